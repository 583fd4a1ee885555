// Deploycheck reads the files of deploy/ and the Dockerfile as their programs do, and refuses what these would not understand: the
// Kubernetes manifest with the types of the API, the compose file with the loader and the schema of docker compose, the dashboard with
// the schema of Grafana, the Dockerfile with the parser of BuildKit. None of these programs runs.
//
//	go run -C tools/deploycheck . ../..
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: deploycheck DIRECTORY OF THE REPOSITORY")
		os.Exit(2)
	}
	root, failed := os.Args[1], false
	for _, c := range []struct {
		file  string
		check func(path string) error
	}{
		{"deploy/kubernetes/epochkv.yaml", checkManifest},
		{"deploy/compose.yaml", checkCompose},
		{"deploy/grafana/epochkv.json", checkDashboard},
		{"Dockerfile", checkDockerfile},
	} {
		err := c.check(filepath.Join(root, c.file))
		if err != nil {
			failed = true
		}
		report(c.file, err)
	}
	if failed {
		os.Exit(1)
	}
}

func report(file string, err error) {
	if err == nil {
		fmt.Println("ok  ", file)
		return
	}
	fmt.Printf("FAIL %s: %v\n", file, err)
}

var errNothing = errors.New("has nothing to check")

func read(path string) ([]byte, error) {
	data, err := os.ReadFile(path)
	if err == nil && len(data) == 0 {
		err = errNothing
	}
	return data, err
}

var background = context.Background()
