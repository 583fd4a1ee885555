package pager

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/epochkv/epochkv/internal/storage/page"
)

var update = flag.Bool("update", false, "rewrite the golden files; a format change needs docs/formats.md and a version decision too")

// goldenPages are pages that use every field of the format.
func goldenPages() map[string][]byte {
	sb := make([]byte, 512)
	(&superblock{
		checkpoint: 0x0102030405060709, pageSize: 512, storeID: [16]byte([]byte("0123456789abcdef")), pageCount: 0x2002,
		allocation: ArrayRoot{Page: 0x1001, Depth: 2},
		state: State{
			Format: FormatNewest, Epoch: 0x030405060708, Root: 0x1002, Height: 3, Entries: 0x1003, EntryBytes: 0x1004,
			Engine: [EngineAreaSize]byte([]byte(string(bytes.Repeat([]byte("engine.."), EngineAreaSize/8)))),
		},
		blobs: BlobState{
			Table: ArrayRoot{Page: 0x1005, Depth: 1}, Slots: 0x1006, Blobs: 0x1007, Bytes: 0x1008, BlobPages: 0x1009, OverflowPages: 0x100a,
		},
		copy: 0x1010, nextCopy: 0x1011,
	}).encode(sb, 1)
	v := PageArray{kind: ArrayIndirectionTable, size: 512, levels: [][]page.ID{make([]page.ID, 61), {0x2000, 0x2001}, {0x3000}}}
	for i := range v.levels[0] {
		v.levels[0][i] = page.ID(0x100 + i)
	}
	leaf, inner := make([]byte, 512), make([]byte, 512)
	v.putNode(leaf, 7, 0, 60, func(i int, payload []byte) { copy(payload, "owner's bytes") })
	v.putNode(inner, 8, 1, 1, nil)
	return map[string][]byte{"superblock": sb, "array-leaf": leaf, "array-inner": inner}
}

// TestFormatIsWhatTheGoldenFilesSay compares pages byte for byte with those of earlier programs.
func TestFormatIsWhatTheGoldenFilesSay(t *testing.T) {
	for name, p := range goldenPages() {
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

// TestStatesOfEarlierFormatsAreRead opens files from before inner nodes stored dead-version ratios (1),
// from before superblocks had copies (2), from before there were two quarantine files (3), and from before the
// engine's area could say that the allocation map is exact, and had a lineage (4).
func TestStatesOfEarlierFormatsAreRead(t *testing.T) {
	for version := uint32(1); version < FormatNewest; version++ {
		dump, err := os.ReadFile(filepath.Join("testdata", fmt.Sprintf("superblock-%d.golden", version)))
		must(t, err)
		now := goldenPages()["superblock"]
		old := bytes.Clone(now)
		binary.LittleEndian.PutUint32(old[sbVersion:], version)
		if version < copiesVersion {
			clear(old[sbCopy:sbReserved])
		}
		page.Seal(old)
		if hex.Dump(old) != string(dump) {
			t.Fatalf("not what version %d wrote:\n%s", version, hex.Dump(old))
		}
		was, err := decodeSuperblock(old, page.ReadHeader(old).ID)
		must(t, err)
		is, err := decodeSuperblock(now, page.ReadHeader(now).ID)
		must(t, err)
		if was.state.Format = is.state.Format; version < copiesVersion {
			was.copy, was.nextCopy = is.copy, is.nextCopy
		}
		if was != is {
			t.Fatalf("%+v, and in version %d %+v", was, FormatNewest, is)
		}
	}
}

// FuzzSuperblock decodes sealed pages of any contents: what is accepted encodes to the same bytes, so that nothing is ignored.
func FuzzSuperblock(f *testing.F) {
	f.Add(goldenPages()["superblock"])
	f.Fuzz(func(t *testing.T, contents []byte) {
		buf := make([]byte, 512)
		copy(buf, contents)
		page.Seal(buf)
		s, err := decodeSuperblock(buf, page.ReadHeader(buf).ID)
		if err != nil {
			return
		}
		again := make([]byte, 512)
		if s.encode(again, page.ReadHeader(buf).ID); !bytes.Equal(again, buf) {
			t.Fatalf("decoded\n%s, encoded\n%s", hex.Dump(buf), hex.Dump(again))
		}
	})
}
