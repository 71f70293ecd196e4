package test

import (
	"encoding/json"
	"errors"
	"go/parser"
	"go/token"
	"io"
	"maps"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/walrelay/walrelay"

// Modules that the product may use directly. A new one is a decision: say why
// in the commit that adds it here.
const (
	modPGX        = "github.com/jackc/pgx/v5"
	modPGLogRepl  = "github.com/jackc/pglogrepl"
	modNATS       = "github.com/nats-io/nats.go"
	modNKeys      = "github.com/nats-io/nkeys" // this and nuid come with nats.go anyway
	modNUID       = "github.com/nats-io/nuid"
	modPrometheus = "github.com/prometheus/client_golang"
	modPromModel  = "github.com/prometheus/client_model" // comes with it; a histogram with classic and native buckets needs its type
	modCobra      = "github.com/spf13/cobra"
	modPFlag      = "github.com/spf13/pflag"
	modYAML       = "go.yaml.in/yaml/v3"
	modCompress   = "github.com/klauspost/compress" // comes with nats.go and client_golang; archives of pruned rows

	modOTel      = "go.opentelemetry.io/otel" // and the modules that it is split into
	modOTelSDK   = "go.opentelemetry.io/otel/sdk"
	modOTelTrace = "go.opentelemetry.io/otel/trace"
	modOTelHTTP  = "go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
)

// layer is what a package may import beside the standard library and event.
type layer struct {
	ours    []string // packages of this module
	drivers []string // modules of others
}

// layers has one line a package: imports run one way, from cmd down to event,
// and siblings meet in cmd only. A new package needs a line.
var layers = map[string]layer{
	"event":       {},
	"sock":        {},
	"charset":     {drivers: []string{modPGX}},
	"pgsession":   {drivers: []string{modPGX}},
	"replication": {ours: []string{"charset", "pgsession", "sock"}, drivers: []string{modPGLogRepl, modPGX}},
	"outbox":      {ours: []string{"charset"}, drivers: []string{modPGX, modCompress}},
	"publisher":   {ours: []string{"sock"}, drivers: []string{modNATS, modNKeys, modNUID}},
	"slotmgr":     {drivers: []string{modPGX}},
	"relay":       {},
	"operate":     {},
	"metrics":     {ours: []string{"relay"}, drivers: []string{modPrometheus, modPromModel}},
	"tracing":     {ours: []string{"relay"}, drivers: []string{modOTel, modOTelSDK, modOTelTrace, modOTelHTTP}},
	"config":      {drivers: []string{modPFlag, modYAML, modPGX}}, // pgx parses the DSN
	"inbox":       {drivers: []string{modPGX, modNATS}},
	"examples":    {ours: []string{"inbox"}, drivers: []string{modPGX, modNATS}},
	"cmd/walrelay": {
		ours:    []string{"config", "metrics", "relay", "operate", "replication", "outbox", "publisher", "slotmgr", "pgsession", "tracing", "inbox"},
		drivers: []string{modCobra, modPFlag, modPGX, modNATS, modPrometheus},
	},
}

// standardOnly are the packages whose dependencies of dependencies count, too:
// the model and the decisions run without any driver.
var standardOnly = []string{"event", "sock", "relay", "operate"}

type pkg struct {
	Dir        string
	ImportPath string
	Name       string
	Standard   bool
	Imports    []string
	Deps       []string
	Module     *struct{ Path string }
}

// house lists every package of the module outside test, by its path in the
// module, and all that they need, by import path.
func house(t *testing.T) (ours, all map[string]pkg) {
	t.Helper()
	ours, all = map[string]pkg{}, map[string]pkg{}
	cmd := exec.CommandContext(t.Context(), "go", "list", "-e", "-deps", "-json=Dir,ImportPath,Name,Standard,Imports,Deps,Module", "./...")
	cmd.Dir = ".."
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, &stderr)
	}
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p pkg
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			return ours, all
		} else if err != nil {
			t.Fatalf("read go list: %v", err)
		}
		all[p.ImportPath] = p
		if rel, ok := inModule(p.ImportPath); ok && !under(rel, "test") {
			ours[rel] = p
		}
	}
}

func inModule(importPath string) (string, bool) {
	return strings.CutPrefix(importPath, module+"/")
}

func under(rel, dir string) bool { return rel == dir || strings.HasPrefix(rel, dir+"/") }

// layerOf finds the line of a package: its own or that of a folder above it.
func layerOf(rel string) (string, bool) {
	for dir := rel; dir != "."; dir = path.Dir(dir) {
		if _, ok := layers[dir]; ok {
			return dir, true
		}
	}
	return "", false
}

func TestHouseImports(t *testing.T) {
	ours, all := house(t)
	for _, rel := range slices.Sorted(maps.Keys(ours)) {
		name, ok := layerOf(rel)
		if !ok {
			t.Errorf("%s: no line in layers says what it may import", rel)
			continue
		}
		for _, imp := range ours[rel].Imports {
			if complaint := complain(name, all[imp], imp); complaint != "" {
				t.Errorf("%s imports %s: %s", rel, imp, complaint)
			}
		}
	}
}

// complain says why the layer may not import a package, or "".
func complain(name string, imported pkg, imp string) string {
	may := layers[name]
	if rel, ok := inModule(imp); ok {
		target, known := layerOf(rel)
		switch {
		case under(rel, "test"):
			return "the product does not depend on its tests"
		case !known || target == "event" && name != "event" || target == name:
			return "" // an unknown package is told of by itself
		case !slices.Contains(may.ours, target):
			return name + " may import only event" + listed(may.ours)
		}
		return ""
	}
	switch {
	case imported.Standard || imp == "C" || imported.Module == nil:
		return ""
	case !slices.Contains(may.drivers, imported.Module.Path):
		return name + " may use only the standard library" + listed(may.drivers)
	}
	return ""
}

func listed(names []string) string {
	if len(names) == 0 {
		return ""
	}
	return ", " + strings.Join(names, ", ")
}

func TestHouseModelAndDecisionsKnowNoDriver(t *testing.T) {
	ours, all := house(t)
	for _, rel := range standardOnly {
		for _, dep := range ours[rel].Deps {
			p := all[dep]
			if own, ok := inModule(dep); !p.Standard && (!ok || !under(own, "event")) {
				t.Errorf("%s depends on %s: want the standard library and event only", rel, dep)
			}
		}
	}
}

func TestHouseDocs(t *testing.T) {
	ours, _ := house(t)
	for _, rel := range slices.Sorted(maps.Keys(ours)) {
		p := ours[rel]
		opening := "Package " + p.Name + " "
		if p.Name == "main" {
			opening = "Command " + path.Base(rel) + " "
		}
		file, err := parser.ParseFile(token.NewFileSet(), filepath.Join(p.Dir, "doc.go"), nil, parser.ParseComments|parser.PackageClauseOnly)
		if err != nil {
			t.Errorf("%s: no doc.go that says what the package is for: %v", rel, err)
			continue
		}
		if !strings.HasPrefix(file.Doc.Text(), opening) {
			t.Errorf("%s: doc.go opens with %.40q, want %q", rel, file.Doc.Text(), opening)
		}
		if slices.Contains([]string{"util", "utils", "common", "types", "helpers", "misc"}, p.Name) {
			t.Errorf("%s: the name says nothing about its purpose", rel)
		}
	}
}

func TestHouseDirectDependencies(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "go", "mod", "edit", "-json")
	cmd.Dir = ".."
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go mod edit: %v", err)
	}
	var file struct {
		Require []struct {
			Path     string
			Indirect bool
		}
		Replace []struct{ Old struct{ Path string } }
	}
	if err := json.Unmarshal(out, &file); err != nil {
		t.Fatalf("read go mod edit: %v", err)
	}
	known := []string{}
	for _, l := range layers {
		known = append(known, l.drivers...)
	}
	for _, r := range file.Require {
		if !r.Indirect && !slices.Contains(known, r.Path) {
			t.Errorf("go.mod requires %s, which no package may use", r.Path)
		}
	}
	for _, r := range file.Replace {
		t.Errorf("go.mod replaces %s: a user's go install would fail", r.Old.Path)
	}
}
