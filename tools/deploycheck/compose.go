package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/compose-spec/compose-go/v2/cli"
)

// checkCompose loads the project as docker compose does, with its schema, and looks for the files that it mounts and builds.
func checkCompose(path string) error {
	options, err := cli.NewProjectOptions([]string{path})
	if err != nil {
		return err
	}
	project, err := options.LoadProject(background)
	if err != nil {
		return err
	}
	if len(project.Services) == 0 {
		return errNothing
	}
	for name, service := range project.Services {
		for _, v := range service.Volumes {
			if _, err := os.Stat(v.Source); v.Type == "bind" && err != nil {
				return fmt.Errorf("service %s mounts a file that is missing: %w", name, err)
			}
		}
		if b := service.Build; b != nil {
			if _, err := os.Stat(filepath.Join(b.Context, b.Dockerfile)); err != nil {
				return fmt.Errorf("service %s: %w", name, err)
			}
		}
	}
	return nil
}
