package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// replaceFile puts a new file of mode 0600 in the place of a file, whole or not at all; if it is durable, also when the machine crashes.
func replaceFile(name string, content []byte, durable bool) error {
	name, err := fileToReplace(name)
	if err != nil {
		return err
	}
	next, err := os.CreateTemp(filepath.Dir(name), filepath.Base(name)+".*")
	if err != nil {
		return err
	}
	_, err = next.Write(content)
	if durable {
		err = errors.Join(err, next.Sync())
	}
	if err = errors.Join(err, next.Close()); err == nil {
		err = os.Rename(next.Name(), name)
	}
	if err != nil {
		err = errors.Join(err, os.Remove(next.Name()))
	}
	return err
}

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
