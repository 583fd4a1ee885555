package keys

import (
	"bytes"
	"testing"
)

func TestQuotedKeysAreShort(t *testing.T) {
	for key, want := range map[string]string{"": `""`, "a/b": `"a/b"`, "a\xff\n": `"a\xff\n"`} {
		if got := Quote([]byte(key)); got != want {
			t.Errorf("%q became %s, expected %s", key, got, want)
		}
	}
	if got := Quote(bytes.Repeat([]byte{0xff}, 2048)); len(got) != 2+4*quotedBytesMax+3 {
		t.Errorf("a long key became %d bytes: %s", len(got), got)
	}
}
