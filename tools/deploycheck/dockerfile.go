package main

import (
	"os"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"
	"github.com/moby/buildkit/frontend/dockerfile/parser"
)

// checkDockerfile parses every instruction with its flags.
func checkDockerfile(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	tree, err := parser.Parse(f)
	if err != nil {
		return err
	}
	stages, _, err := instructions.Parse(tree.AST, nil)
	if err == nil && len(stages) == 0 {
		err = errNothing
	}
	return err
}
