// Render the templates of a Helm chart, for the checks of deploy/helm where helm itself cannot be had.
//
// Helm's engine is Go's text/template with sprig's functions and a few of its own, of which those that the chart uses
// are here. Nothing is installed, and no capability of a cluster is known. Reads {"values", "chart", "release"} from
// stdin; its argument is the folder of the templates. Prints {"file": "rendered text"} as JSON.
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"text/template"

	"github.com/Masterminds/sprig"
	"sigs.k8s.io/yaml"
)

type input struct {
	Values  map[string]interface{}
	Chart   map[string]interface{}
	Release map[string]interface{}
}

func fail(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func main() {
	var given input
	fail(json.NewDecoder(os.Stdin).Decode(&given))
	all := template.New("chart").Option("missingkey=error")
	functions := sprig.TxtFuncMap()
	functions["toYaml"] = func(value interface{}) (string, error) {
		text, err := yaml.Marshal(value)
		return strings.TrimSuffix(string(text), "\n"), err
	}
	functions["include"] = func(name string, data interface{}) (string, error) {
		var text bytes.Buffer
		err := all.ExecuteTemplate(&text, name, data)
		return text.String(), err
	}
	all.Funcs(functions)
	paths, err := filepath.Glob(filepath.Join(os.Args[1], "*"))
	fail(err)
	for _, path := range paths {
		text, err := os.ReadFile(path)
		fail(err)
		_, err = all.New(filepath.Base(path)).Parse(string(text))
		fail(err)
	}
	data := map[string]interface{}{"Values": given.Values, "Chart": given.Chart, "Release": given.Release}
	rendered := map[string]string{}
	for _, path := range paths {
		name := filepath.Base(path)
		if strings.HasPrefix(name, "_") {
			continue
		}
		var text bytes.Buffer
		fail(all.ExecuteTemplate(&text, name, data))
		rendered[name] = text.String()
	}
	fail(json.NewEncoder(os.Stdout).Encode(rendered))
}
