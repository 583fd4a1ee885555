package blob

import (
	"bytes"
	"encoding/hex"
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
)

var update = flag.Bool("update", false, "rewrite the golden files; a format change needs docs/formats.md and a version decision too")

// goldenBytes use every field of the format.
func goldenBytes() map[string][]byte {
	data, overflow := make([]byte, 512), make([]byte, 512)
	d := newBlobPage(data, 0x1234, 7)
	d.add(0x0102030405, fragmentWhole, []byte("whole"))
	d.add(2, fragmentHead, (&head{
		length: 944 + 9, extents: []pager.Extent{{First: 0x101, Count: 1}, {First: 0x203, Count: 1}}, remainder: []byte("remainder"),
	}).encode())
	d.add(3, fragmentWhole|fragmentContinued, []byte("\x04\x00\x00\x00\x00\x00\x00\x00first part"))
	d.add(4, fragmentSecond, []byte("second part"))
	d.add(5, fragmentWhole, nil)
	d.seal()
	page.PutHeader(overflow, page.Header{Type: page.TypeOverflow, ID: 0x101, Checkpoint: 7})
	putOverflow(overflow, 2, bytes.Repeat([]byte("value..."), 59))
	r := ref{id: 0x0102030405, length: 5, checksum: 0xaabbccdd}.encode()
	table := make([]byte, 16)
	putTableEntry(table, 0, makeLocation(0x1234, 2, 0x1ff, fragmentHead))
	putTableEntry(table, 1, makeLocation(0x1234, 3, 0x20, fragmentWhole|fragmentContinued))
	return map[string][]byte{"blobs": data, "overflow": overflow, "ref": r[:], "table": table}
}

// TestFormatIsWhatTheGoldenFilesSay compares bytes with those of earlier programs.
func TestFormatIsWhatTheGoldenFilesSay(t *testing.T) {
	for name, p := range goldenBytes() {
		path := filepath.Join("testdata", name+".golden")
		if *update {
			must(t, os.WriteFile(path, []byte(hex.Dump(p)), 0o644))
		}
		want, err := os.ReadFile(path)
		must(t, err)
		if got := hex.Dump(p); got != string(want) {
			t.Errorf("%s differs from %s:\n%s", name, path, got)
		}
	}
}
