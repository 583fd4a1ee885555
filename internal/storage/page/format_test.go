package page

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
)

var update = flag.Bool("update", false, "rewrite the golden files; a format change needs docs/formats.md and a version decision too")

// goldenPages are small pages that use every part of the format.
func goldenPages() map[string][]byte {
	at := func(e keys.Epoch) keys.Trailer { return keys.MakeTrailer(e, keys.KindSet) }
	leaf := make([]byte, 512)
	BuildLeaf(leaf, 7, []Entry{
		{Key: []byte("\x10user/1"), Trailer: at(9), Value: []byte("new")},
		{Key: []byte("\x10user/1"), Trailer: at(4), Value: []byte("old"), Same: true},
		{Key: []byte("\x10user/22"), Trailer: keys.MakeTrailer(5, keys.KindDelete)},
		{Key: []byte("\x10user/a longer key"), Trailer: at(3), Value: bytes.Repeat([]byte{0xab}, RefSize), Large: true},
	})
	SetID(leaf, 0x1234)
	inner := make([]byte, 512)
	BuildInner(inner, 8, 2, []Child{
		{ID: 10, Newest: 5},
		{ID: 11, Newest: 9, DeadVersions: 3, Separator: Separator{Key: []byte("\x10m"), Trailer: NoTrailer}},
		{ID: 12, Newest: 2, Separator: Separator{Key: []byte("\x10m"), Trailer: at(4) - 1}},
		{ID: 0x1234567890, Newest: 0, DeadVersions: ratioWhole, Separator: Separator{Key: []byte("\x10zebra"), Trailer: NoTrailer}},
	})
	SetID(inner, 0x5678)
	return map[string][]byte{"leaf": leaf, "inner": inner}
}

// TestFormatIsWhatTheGoldenFilesSay compares pages byte for byte with those of earlier programs, and reads those.
func TestFormatIsWhatTheGoldenFilesSay(t *testing.T) {
	for name, p := range goldenPages() {
		path := filepath.Join("testdata", name+".golden")
		if *update {
			if err := os.WriteFile(path, []byte(hex.Dump(p)), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if got := hex.Dump(p); got != string(want) {
			t.Errorf("%s differs from %s:\n%s", name, path, got)
		}
		old := undump(t, string(want))
		if err := errors.Join(Check(old, ReadHeader(old).ID), Verify(old)); err != nil {
			t.Errorf("%s: %v", path, err)
		}
	}
}

// TestInnerNodesOfFormat1HaveNoDeadVersions reads a node from before nodes stored their children's dead-version
// ratios.
func TestInnerNodesOfFormat1HaveNoDeadVersions(t *testing.T) {
	dump, err := os.ReadFile(filepath.Join("testdata", "inner-1.golden"))
	if err != nil {
		t.Fatal(err)
	}
	old := Inner(undump(t, string(dump)))
	if err := errors.Join(Check(old, ReadHeader(old).ID), Verify(old)); err != nil {
		t.Fatal(err)
	}
	want := []keys.Epoch{5, 9, 2, 0}
	for i, newest := range want {
		if old.Newest(i) != newest || old.DeadVersions(i) != 0 {
			t.Errorf("child %d: newest %d, stale %d", i, old.Newest(i), old.DeadVersions(i))
		}
	}
	if old.Count() != len(want) || old.DeadVersionRatio() != 0 {
		t.Errorf("%d children, dead-version ratio %d", old.Count(), old.DeadVersionRatio())
	}
}

// undump reads a hex dump back.
func undump(t *testing.T, dump string) (out []byte) {
	t.Helper()
	for line := range strings.Lines(dump) {
		b, err := hex.DecodeString(strings.ReplaceAll(line[10:58], " ", ""))
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, b...)
	}
	return out
}

// TestFingerprintsNeverChange pins the hash that leaves store.
func TestFingerprintsNeverChange(t *testing.T) {
	var got []byte
	for _, k := range []string{"", "a", "ab", "1234567", "12345678", "123456789", "1234567812345678", "12345678123456789"} {
		got = append(got, Fingerprint([]byte(k)))
	}
	if want := "00a9a35b46ac06f1"; hex.EncodeToString(got) != want {
		t.Fatalf("fingerprints %x, want %s", got, want)
	}
}

// TestRefusalsSayWhy breaks a page in ways that have different remedies.
func TestRefusalsSayWhy(t *testing.T) {
	for _, c := range []struct {
		name  string
		spoil func(p []byte)
		want  error
		text  string
	}{
		{"flipped bit", func(p []byte) { p[300] ^= 4 }, ErrChecksum, "computed"},
		{"other id", func(p []byte) { SetID(p, 99) }, ErrMisplaced, "page 99 at the offset of page 4660"},
		{"newer version", func(p []byte) { p[offVersion] = 2; Seal(p) }, ErrUnknown, "version 2"},
		{"compression flag", func(p []byte) { p[offFlags] = 1; Seal(p) }, ErrUnknown, "flags 0x0001"},
		{"unknown type", func(p []byte) { p[offType] = 77; Seal(p) }, ErrUnknown, "type 77"},
		{"no tree page", func(p []byte) { p[offType] = byte(TypeArray); Seal(p) }, ErrUnknown, "type 4"},
		{"reserved byte", func(p []byte) { p[50] = 1; Seal(p) }, ErrMalformed, "reserved"},
		{"too many entries", func(p []byte) { p[offCount+1] = 0xff; Seal(p) }, ErrMalformed, "do not fit"},
		{"none", func(p []byte) { p[offCount] = 0; Seal(p) }, ErrMalformed, "empty"},
		{"fingerprint", func(p []byte) { p[treeHeaderSize] ^= 1; Seal(p) }, ErrMalformed, "fingerprint of entry 0"},
		{"newest epoch", func(p []byte) { p[offNewest] = 8; Seal(p) }, ErrMalformed, "has epoch 9"},
		{"reserved flag", func(p []byte) { p[entryAt(p, 0)+9] |= 0x80; Seal(p) }, ErrUnknown, "reserved flag"},
		{"kind", func(p []byte) { p[entryAt(p, 0)] = 32; Seal(p) }, ErrUnknown, "kind 32"},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := goldenPages()["leaf"]
			c.spoil(p)
			err := Check(p, 0x1234)
			if err == nil {
				err = Verify(p)
			}
			if !errors.Is(err, c.want) || !strings.Contains(fmt.Sprint(err), c.text) {
				t.Fatalf("%v, want %v with %q", err, c.want, c.text)
			}
		})
	}
}

// TestDisorderIsRefused builds pages of keys, versions and separators that do not ascend.
func TestDisorderIsRefused(t *testing.T) {
	at := func(e keys.Epoch) keys.Trailer { return keys.MakeTrailer(e, keys.KindSet) }
	sep := func(key string, tr keys.Trailer) Child {
		return Child{ID: 2, Separator: Separator{Key: []byte(key), Trailer: tr}}
	}
	leaf := func(e ...Entry) (p [512]byte) {
		BuildLeaf(p[:], 1, e)
		return p
	}
	inner := func(c ...Child) (p [512]byte) {
		BuildInner(p[:], 1, 1, c)
		return p
	}
	for name, p := range map[string][512]byte{
		"keys":           leaf(Entry{Key: []byte("b"), Trailer: at(1)}, Entry{Key: []byte("a"), Trailer: at(1)}),
		"long keys":      leaf(Entry{Key: []byte("abcdef"), Trailer: at(1)}, Entry{Key: []byte("abcdeb"), Trailer: at(1)}, Entry{Key: []byte("b"), Trailer: at(1)}),
		"equal keys":     leaf(Entry{Key: []byte("a"), Trailer: at(1)}, Entry{Key: []byte("a"), Trailer: at(2)}, Entry{Key: []byte("b"), Trailer: at(2)}),
		"versions":       leaf(Entry{Key: []byte("a"), Trailer: at(1)}, Entry{Key: []byte("a"), Trailer: at(2), Same: true}),
		"separators":     inner(sep("", NoTrailer), sep("b", NoTrailer), sep("a", NoTrailer)),
		"equal trailers": inner(sep("", NoTrailer), sep("b", at(3)), sep("b", at(3))),
	} {
		if err := Verify(p[:]); !errors.Is(err, ErrMalformed) || !strings.Contains(err.Error(), "scend") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// entryAt is where entry i begins.
func entryAt(p Leaf, i int) int {
	return int(binary.LittleEndian.Uint16(p.Layout().offsets[2*i:]))
}

// TestSizesArePredictedExactly fills pages to the last byte that LeafSize and InnerSize allow.
func TestSizesArePredictedExactly(t *testing.T) {
	for n := 1; n < 40; n++ {
		var sum LeafSize
		var entries []Entry
		for i := range n {
			e := Entry{Key: fmt.Appendf(nil, "shared/%03d", i), Value: []byte("v"), Trailer: keys.MakeTrailer(1, keys.KindSet)}
			with := sum.With(&e)
			sum.Add(&e)
			if sum.Bytes() != with {
				t.Fatalf("With says %d, Bytes %d", with, sum.Bytes())
			}
			entries = append(entries, e)
		}
		if sum.Bytes() > 4096 {
			break
		}
		p := Leaf(make([]byte, 4096))
		BuildLeaf(p, 1, entries)
		if p.Used() != sum.Bytes() {
			t.Fatalf("%d entries use %d bytes, %d were predicted", n, p.Used(), sum.Bytes())
		}
	}
}
