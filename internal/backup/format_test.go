package backup

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"flag"
	"hash/crc32"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/objectstore"
)

var update = flag.Bool("update", false, "rewrite golden files; goes with docs/formats.md and a decision about the version")

// goldenDirs have targets with backups in the formats of manifests from 1 on: one in each of the first two, in the last one a full backup and an
// incremental one. The newest backup is of a store with goldenContent. The last directory has what this program writes.
var goldenDirs = []string{"testdata/backup-1", "testdata/backup-2", "testdata/backup-3"}

var goldenDir = goldenDirs[len(goldenDirs)-1]

func goldenContent() map[string][]byte {
	return map[string][]byte{"a": []byte("plain"), "b": {}, "c": bytes.Repeat([]byte("large "), 200)}
}

// writeGolden makes the golden backup anew.
func writeGolden(t *testing.T) {
	t.Helper()
	f := newFixture(t)
	x, err := f.store.Session()
	check(t, err)
	defer x.Close()
	check(t, os.RemoveAll(goldenDir))
	target, err := objectstore.Open(goldenDir, objectstore.Options{})
	check(t, err)
	for _, key := range []string{"a", "b", "c"} {
		var w mvcc.Write
		w.Batch.Set(keys.SpaceUser, []byte(key), goldenContent()[key])
		_, err := x.Commit(t.Context(), &w)
		check(t, err)
		if key != "b" {
			check(t, f.store.Checkpoint(t.Context()))
			_, err = Create(t.Context(), f.store, target, Options{Base: LatestBase, Program: "golden", lease: quickLease})
			check(t, err)
		}
	}
}

// golden returns the newest golden backup.
func golden(t *testing.T) (objectstore.Store, *Manifest) {
	t.Helper()
	return goldenIn(t, goldenDir)
}

func goldenIn(t *testing.T, dir string) (objectstore.Store, *Manifest) {
	t.Helper()
	target, err := objectstore.Open(dir, objectstore.Options{Retry: objectstore.QuickRetry})
	check(t, err)
	dirs, err := Dirs(t.Context(), target)
	check(t, err)
	if len(dirs) != 1 {
		t.Fatalf("lineages %v", dirs)
	}
	all, broken, err := List(t.Context(), target, dirs[0])
	check(t, err)
	if len(all) == 0 || len(broken) > 0 {
		t.Fatalf("%d backups, %v", len(all), broken)
	}
	return target, all[len(all)-1]
}

// Backups of versions before stay readable: the golden ones restore, and their manifests are what this program would write.
func TestTheGoldenBackupsRestoreAndAreWhatIsWritten(t *testing.T) {
	if *update {
		writeGolden(t)
	}
	for i, dir := range goldenDirs {
		target, m := goldenIn(t, dir)
		_, err := Verify(t.Context(), target, m, nil)
		check(t, err)
		f := &fixture{t: t, target: objectstore.NewFaulty(target)}
		s := f.restored(m, RestoreOptions{})
		compare(t, s, goldenContent())
		check(t, s.Close())
		p, err := os.ReadFile(filepath.Join(dir, m.dir(), m.name))
		check(t, err)
		name := m.name
		again, err := m.encode()
		check(t, err)
		if !bytes.Equal(p, again) || m.name != name || m.Format != i+1 {
			t.Fatalf("the manifest is encoded otherwise:\n%s\nbefore:\n%s", again, p)
		}
	}
	checkGoldenBytes(t)
}

// checkGoldenBytes checks the fields of the newest golden manifest, and the header of its part.
func checkGoldenBytes(t *testing.T) {
	t.Helper()
	_, m := golden(t)
	p, err := os.ReadFile(filepath.Join(goldenDir, m.dir(), m.name))
	check(t, err)
	fields := []string{}
	for line := range strings.SplitSeq(string(p), "\n") {
		if name, _, is := strings.Cut(line, `":`); is {
			fields = append(fields, strings.Trim(name, ` "`))
		}
	}
	want := "format id kind created state lineage store_id epoch term commit_time_us feature_level checkpoint page_size page_count superblock base id sha256 checkpoint " +
		"pages live_pages digest parts sha256 bytes pages first last table sha256 bytes pages first last program"
	if got := strings.Join(fields, " "); got != want {
		t.Fatalf("fields\n%s\nwant\n%s", got, want)
	}
	part, err := os.ReadFile(filepath.Join(goldenDir, partName(m.dir(), m.Parts[0].SHA256)))
	check(t, err)
	if header := partHeader(partPages, 512); !bytes.Equal(part[:partHeaderSize], header) {
		t.Fatalf("header %x, want %x", header, part[:partHeaderSize])
	}
}

// The header and the frames of a part, byte for byte, but for what zstd makes of a content.
func TestTheBytesOfAPartAreThoseOfTheDocument(t *testing.T) {
	const header = "45504b562d50525402000000" + "02000000" + "00020000" + "00000000"
	part := samplePart(t)
	if got := hex.EncodeToString(part[:partHeaderSize]); got != header {
		t.Fatalf("header %s, want %s", got, header)
	}
	if length := part[partHeaderSize : partHeaderSize+4]; !bytes.Equal(length, []byte{0x2c, 1, 0, 0}) {
		t.Fatalf("length of the first frame: %x", length)
	}
	sum := sha256.Sum256(part)
	want := bytes.Join(sampleContents(), nil)
	content, err := fileContent(hex.EncodeToString(sum[:]), part, 512, len(want))
	check(t, err)
	if !bytes.Equal(content, want) {
		t.Fatalf("content %q", content)
	}
	_, err = fileContent(hex.EncodeToString(sum[:]), part, 512, len(want)-1)
	wantError(t, err, ErrDamaged)
	last := part[len(part)-frameHeader-4:] // is stored as it is
	if got := hex.EncodeToString(last[:8]) + hex.EncodeToString(last[12:]); got != "04000000"+"04000000"+"00000000"+"6c617374" {
		t.Fatalf("last frame %x", last)
	}
	if got, want := binary.LittleEndian.Uint32(last[8:]), crc32.Checksum([]byte("\x00\x00\x00\x00last"), crc32.MakeTable(crc32.Castagnoli)); got != want {
		t.Fatalf("checksum %x, want %x", got, want)
	}
}

// samplePart has frames of a file: one of each codec, and a short one.
func samplePart(t *testing.T) []byte {
	t.Helper()
	c, part, kinds := newCompressor(1), partHeader(partFile, 512), []codec{}
	for _, content := range sampleContents() {
		frame := c.frame(content)
		kinds = append(kinds, codec(binary.LittleEndian.Uint32(frame[offFrameCodec:])))
		part = append(part, frame...)
	}
	if want := []codec{codecS2, codecZstd, codecNone, codecNone}; !slices.Equal(kinds, want) {
		t.Fatalf("codecs %v, want %v", kinds, want)
	}
	return part
}

func sampleContents() [][]byte {
	rng := rand.New(rand.NewPCG(1, 2))
	random, text := make([]byte, 300), []byte{}
	for i := range random {
		random[i] = byte(rng.Uint32())
	}
	words := strings.Fields("a backup is a copy of the newest durable state of a server in a directory or in a bucket made while the server works and verified")
	for range 600 {
		text = append(append(text, words[rng.IntN(len(words))]...), ' ')
	}
	return [][]byte{bytes.Repeat([]byte("abc"), 100), text, random, []byte("last")}
}

// Every byte of a part and of a manifest is covered by the hash in its name. Those of a part are covered twice: with a name that
// fits, no bit changes what is read.
func TestEveryFlippedByteOfAPartOrManifestIsNamed(t *testing.T) {
	part, nothing := samplePart(t), func([]byte) error { return nil }
	sum := sha256.Sum256(part)
	name := hex.EncodeToString(sum[:])
	check(t, readPart(name, part, partFile, 512, nothing))
	for bit := 0; bit < 8*len(part); bit += exhaustiveStep {
		part[bit/8] ^= 1 << (bit % 8)
		wantError(t, readPart(name, part, partFile, 512, nothing), ErrDamaged)
		fits := sha256.Sum256(part)
		if err := readPart(hex.EncodeToString(fits[:]), part, partFile, 512, nothing); !errors.Is(err, ErrDamaged) && !errors.Is(err, ErrNewerFormat) {
			t.Fatalf("bit %d of a part with a name that fits: %v", bit, err)
		}
		part[bit/8] ^= 1 << (bit % 8)
	}
	target, m := golden(t)
	manifest, err := readObject(t.Context(), target, m.dir()+"/"+m.name)
	check(t, err)
	for at := 0; at < len(manifest); at += exhaustiveStep {
		manifest[at] ^= 1 << (at % 8)
		_, err := decodeManifest(m.name, manifest)
		wantError(t, err, ErrDamaged)
		manifest[at] ^= 1 << (at % 8)
	}
}

// A program refuses by name what it does not know, and never guesses.
func TestNewerFormatsAreRefusedByName(t *testing.T) {
	part := samplePart(t)
	part[offPartVersion]++
	sum := sha256.Sum256(part)
	wantError(t, readPart(hex.EncodeToString(sum[:]), part, partFile, 512, nil), ErrNewerFormat)
	_, m := golden(t)
	m.Format++
	p, err := m.encode()
	check(t, err)
	_, err = decodeManifest(m.name, p)
	wantError(t, err, ErrNewerFormat)
	m.Format--
	p, err = m.encode()
	check(t, err)
	p = bytes.Replace(p, []byte(`"program"`), []byte(`"unknown": 1, "program"`), 1)
	sum = sha256.Sum256(p)
	_, err = decodeManifest(manifestsDir+m.ID+"."+hex.EncodeToString(sum[:]), p)
	wantError(t, err, ErrDamaged)
	size := m.Parts[0].Bytes
	m.Parts[0].Bytes = objectBytesMax + 1 // which a check of the backup would read into memory
	p, err = m.encode()
	check(t, err)
	_, err = decodeManifest(m.name, p)
	wantError(t, err, ErrDamaged)
	m.Parts[0].Bytes, m.Table[0].Pages, m.LivePages = size, m.Table[0].Pages+tablePages, m.LivePages+tablePages // the same
	p, err = m.encode()
	check(t, err)
	_, err = decodeManifest(m.name, p)
	wantError(t, err, ErrDamaged)
}
