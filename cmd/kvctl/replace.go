package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// errNotRegular is a name that is given for a file and belongs to something else.
var errNotRegular = errors.New("not a regular file")

// fileToReplace is the name that a new file is to take: that of the file to which a link leads. What is not a regular file is not replaced: a
// rename puts a file in the place of a pipe that others read, or, for root, of /dev/null.
func fileToReplace(name string) (string, error) {
	target, err := filepath.EvalSymlinks(name)
	if errors.Is(err, fs.ErrNotExist) {
		return name, nil
	}
	if err != nil {
		return "", err
	}
	return target, regular(target)
}

// regular returns errNotRegular for what exists and is not a regular file.
func regular(name string) error {
	info, err := os.Stat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s: %w", name, errNotRegular)
	}
	return err
}
