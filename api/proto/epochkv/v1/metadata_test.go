package epochkvv1

import (
	"bytes"
	"testing"
	"unicode/utf8"
)

// TestBytesInMetadataAreUTF8OrBase64: the name of an entry says how its bytes are written, so that a client in any language reads
// them without knowing what they are.
func TestBytesInMetadataAreUTF8OrBase64(t *testing.T) {
	all := make([]byte, 256)
	for i := range all {
		all[i] = byte(i)
	}
	for name, row := range map[string]struct {
		value       []byte
		entry, text string
	}{
		"text":          {[]byte(`a "quoted" \x1f`), "key", `a "quoted" \x1f`},
		"other scripts": {[]byte("schlüssel/键"), "key", "schlüssel/键"},
		"empty":         {nil, "key", ""},
		"control":       {[]byte("a\x00\n"), "key", "a\x00\n"},
		"binary":        {[]byte{0xff, 0xfe}, "key_base64", "//4="},
		"cut character": {[]byte("\xe9\x94"), "key_base64", "6ZQ="},
		"every byte":    {all, "key_base64", ""},
	} {
		metadata := map[string]string{}
		SetBytes(metadata, "key", row.value)
		text, ok := metadata[row.entry]
		if !ok || len(metadata) != 1 || row.text != "" && text != row.text || !utf8.ValidString(text) {
			t.Errorf("%s: %q", name, metadata)
		}
		if got, ok := Bytes(metadata, "key"); !ok || !bytes.Equal(got, row.value) {
			t.Errorf("%s: read back as %q, %v", name, got, ok)
		}
	}
	if got, ok := Bytes(map[string]string{"key_base64": "?"}, "key"); ok {
		t.Errorf("damaged base64 is %q", got)
	}
	if _, ok := Bytes(map[string]string{"other": "x"}, "key"); ok {
		t.Error("an entry that is missing was found")
	}
}
