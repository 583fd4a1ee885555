// Command packages turns a Debian package index into records that kvctl import reads.
//
//	apt-cache dumpavail | go run ./examples/packages > packages.jsonl
//	kvctl import packages.jsonl
//
// The index is text: one stanza per package, stanzas divided by empty lines, a field per line. The
// key of a stanza is package/version, so that all versions of a package share a prefix; the value
// is the stanza as it is. Two repositories may offer the same version of a package: the later
// stanza wins. The output is sorted by key, as an export is, so that the two can be compared byte
// by byte.
//
// tour.sh in this directory does all of that against a server of its own, kills it, and compares.
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"unicode/utf8"
)

func main() {
	if err := convert(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "packages:", err)
		os.Exit(1)
	}
}

// convert reads an index and writes its records in the order of their keys.
func convert(in io.Reader, out io.Writer) error {
	stanzas, err := readIndex(in)
	if err != nil {
		return err
	}
	buffered := bufio.NewWriter(out)
	encoder := json.NewEncoder(buffered)
	encoder.SetEscapeHTML(false)
	for _, key := range slices.Sorted(maps.Keys(stanzas)) {
		if err := encoder.Encode(recordOf(key, stanzas[key])); err != nil {
			return err
		}
	}
	return buffered.Flush()
}

// record is a line of kvctl's JSON Lines. Old maintainers' names are not always UTF-8: bytes that
// are not go in base64.
type record struct {
	Key         string `json:"key"`
	Value       string `json:"value,omitempty"`
	ValueBase64 []byte `json:"value_base64,omitempty"`
}

func recordOf(key string, stanza []byte) record {
	if utf8.Valid(stanza) {
		return record{Key: key, Value: string(stanza)}
	}
	return record{Key: key, ValueBase64: stanza}
}

// readIndex collects the stanzas by package/version.
func readIndex(in io.Reader) (map[string][]byte, error) {
	stanzas := map[string][]byte{}
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, 16<<20) // some packages have very long lists of dependencies
	var stanza []byte
	finish := func() error {
		if len(stanza) == 0 {
			return nil
		}
		key, err := keyOf(stanza)
		if err != nil {
			return err
		}
		stanzas[key], stanza = stanza, nil
		return nil
	}
	for lines.Scan() {
		if len(lines.Bytes()) > 0 {
			stanza = append(append(stanza, lines.Bytes()...), '\n')
			continue
		}
		if err := finish(); err != nil {
			return nil, err
		}
	}
	return stanzas, errors.Join(lines.Err(), finish())
}

func keyOf(stanza []byte) (string, error) {
	name, version := field(stanza, "Package: "), field(stanza, "Version: ")
	if name == "" || version == "" {
		return "", fmt.Errorf("a stanza has no Package or no Version: %.80q", stanza)
	}
	if key := name + "/" + version; utf8.ValidString(key) {
		return key, nil
	}
	return "", fmt.Errorf("package %q: its name or version is not UTF-8", name)
}

// field is the value of the line that begins with prefix.
func field(stanza []byte, prefix string) string {
	for line := range bytes.Lines(stanza) {
		if value, ok := bytes.CutPrefix(line, []byte(prefix)); ok {
			return string(bytes.TrimSpace(value))
		}
	}
	return ""
}
