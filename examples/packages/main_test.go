package main

import (
	"bytes"
	"strings"
	"testing"
)

func TestIndexBecomesSortedRecords(t *testing.T) {
	const index = `Package: zlib
Version: 1:1.3
Description: compression
 with <angles> & more


Package: apt
Version: 2.6
Description: old

Package: apt
Version: 2.6
Description: new
`
	var out bytes.Buffer
	if err := convert(strings.NewReader(index+"\nPackage: latin\nVersion: 1\nMaintainer: Andr\xe9"), &out); err != nil {
		t.Fatal(err)
	}
	const want = `{"key":"apt/2.6","value":"Package: apt\nVersion: 2.6\nDescription: new\n"}
{"key":"latin/1","value_base64":"UGFja2FnZTogbGF0aW4KVmVyc2lvbjogMQpNYWludGFpbmVyOiBBbmRy6Qo="}
{"key":"zlib/1:1.3","value":"Package: zlib\nVersion: 1:1.3\nDescription: compression\n with <angles> & more\n"}
`
	if out.String() != want {
		t.Errorf("got:\n%s\nwant:\n%s", out.String(), want)
	}
}

func TestAStanzaWithoutVersionIsAnError(t *testing.T) {
	if err := convert(strings.NewReader("Package: a\n\n"), &bytes.Buffer{}); err == nil {
		t.Error("a stanza without a version was taken")
	}
}
