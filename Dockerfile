# A static binary on scratch: no shell, no package, no user but 65532.
#
#   docker build -t walrelay .                          compiles in the build stage
#   make image                                          wraps bin/walrelay, pulls nothing
#
# The binary stage comes first so that builders which run every stage up to the
# target do not pull the one below it.

FROM scratch AS binary
COPY bin/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
COPY bin/walrelay /walrelay
USER 65532:65532
ENV WALRELAY_HTTP_ADDR=0.0.0.0:8080
EXPOSE 8080
ENTRYPOINT ["/walrelay"]
CMD ["run"]

FROM golang:1.26 AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
ARG VERSION=dev
ARG COMMIT=unknown
RUN CGO_ENABLED=0 go build -trimpath -buildvcs=false \
    -ldflags "-s -w -X main.version=${VERSION} -X main.commit=${COMMIT}" \
    -o /out/walrelay ./cmd/walrelay

FROM scratch
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
COPY --from=build /out/walrelay /walrelay
USER 65532:65532
ENV WALRELAY_HTTP_ADDR=0.0.0.0:8080
EXPOSE 8080
ENTRYPOINT ["/walrelay"]
CMD ["run"]
