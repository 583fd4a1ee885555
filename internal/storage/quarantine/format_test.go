package quarantine

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"flag"
	"os"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
)

var update = flag.Bool("update", false, "rewrite the golden file; a format change needs docs/formats.md and a version decision too")

// fileContent is what a file of the smallest size for these versions holds.
func fileContent(versions []Version) []byte {
	b := encode(versions)
	b = append(b, make([]byte, alignCopy(int64(len(b)))-int64(len(b)))...)
	return append(b, b...)
}

func examples() []Version {
	return []Version{
		{Key: []byte("\x10deleted"), Trailer: keys.MakeTrailer(9, keys.KindDelete), Reason: "key size out of bounds"},
		{Key: []byte("\x10deleted"), Trailer: keys.MakeTrailer(7, keys.KindSet), Value: []byte("value"), Reason: "key size out of bounds"},
		{Key: []byte("\x10empty"), Trailer: keys.MakeTrailer(keys.MaxEpoch, keys.KindSet)},
	}
}

// TestFormatIsWhatTheGoldenFileSays compares a file byte for byte with that of an earlier program.
func TestFormatIsWhatTheGoldenFileSays(t *testing.T) {
	const path = "testdata/quarantine.golden"
	content := fileContent(examples())
	if !bytes.Equal(content[:len(content)/2], content[len(content)/2:]) || len(content)%(2*copyAlign) != 0 {
		t.Fatal("not two aligned copies")
	}
	dump := hex.Dump(bytes.TrimRight(content[:len(content)/2], "\x00"))
	if *update {
		if err := os.WriteFile(path, []byte(dump), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil || dump != string(want) {
		t.Errorf("differs from %s: %v\n%s", path, err, dump)
	}
}

func mustEqual(t *testing.T, got, want []Version) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%d versions, want %d", len(got), len(want))
	}
	for i := range want {
		g, w := got[i], want[i]
		if !bytes.Equal(g.Key, w.Key) || !bytes.Equal(g.Value, w.Value) || g.Trailer != w.Trailer || g.Reason != w.Reason {
			t.Fatalf("version %d is %+v, want %+v", i, g, w)
		}
	}
}

// TestAnyDamagedByteCostsNothing flips each byte of a file: the versions are read from the other copy, and the damage is reported.
func TestAnyDamagedByteCostsNothing(t *testing.T) {
	content := fileContent(examples())
	for i := range content {
		content[i] ^= 0x20
		got, fault, err := decode(content)
		if err != nil || fault == nil {
			t.Fatalf("byte %d: fault %v, error %v", i, fault, err)
		}
		mustEqual(t, got, examples())
		content[i] ^= 0x20
	}
}

// TestDamageOfBothCopiesAndNewerVersionsAreDifferentErrors.
func TestDamageOfBothCopiesAndNewerVersionsAreDifferentErrors(t *testing.T) {
	content := fileContent(examples())
	half := len(content) / 2
	for i := range half {
		b := bytes.Clone(content)
		b[i] ^= 1
		b[half+i] ^= 1
		if _, _, err := decode(b); !errors.Is(err, ErrDamaged) || errors.Is(err, ErrVersion) {
			t.Fatalf("byte %d of both copies: %v", i, err)
		}
	}
	for n := range len(content) {
		if _, fault, err := decode(content[:n]); err == nil && fault == nil {
			t.Fatalf("cut to %d bytes: no error", n)
		}
	}
	for _, at := range []int{0, half} {
		b := content[at : at+half]
		binary.LittleEndian.PutUint32(b[offVersion:], version+1)
		length := headerSize + int(binary.LittleEndian.Uint64(b[offBytes:]))
		binary.LittleEndian.PutUint32(b[offCRC:], checksum(b[:length]))
	}
	if _, _, err := decode(content); !errors.Is(err, ErrVersion) {
		t.Fatalf("a newer version: %v", err)
	}
}

// TestCheckKeepsTheBounds tries as much as is kept, and one more.
func TestCheckKeepsTheBounds(t *testing.T) {
	many := make([]Version, VersionsMax+1)
	for i := range many {
		many[i].Key = []byte("\x10k")
	}
	if err := Check(many[1:]); err != nil {
		t.Fatal(err)
	}
	if err := Check(many); !errors.Is(err, ErrFull) {
		t.Fatalf("%d versions: %v", len(many), err)
	}
	large := []Version{{Key: []byte("\x10k"), Value: make([]byte, BytesMax-2), Reason: ""}}
	if err := Check(large); err != nil {
		t.Fatal(err)
	}
	large[0].Reason = "r"
	if err := Check(large); !errors.Is(err, ErrFull) || !strings.Contains(err.Error(), "r") {
		t.Fatalf("one byte more: %v", err)
	}
}

// FuzzDecode: no bytes make the decoder panic, and what it takes it writes the same way.
func FuzzDecode(f *testing.F) {
	content := fileContent(examples())
	f.Add(content[:len(content)/2])
	f.Add(encode(examples()))
	f.Fuzz(func(t *testing.T, b []byte) {
		versions, err := decodeCopy(b)
		if err != nil {
			return
		}
		if again := encode(versions); !bytes.Equal(again[:headerSize], b[:headerSize]) {
			t.Fatalf("%x is written as %x", b[:headerSize], again[:headerSize])
		}
	})
}
