package wal

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	"math/rand/v2"
	"testing"

	"github.com/epochkv/epochkv/internal/vfs"
)

// TestRangeSumsAreThoseOfTheBytes: any ranges, in files that end anywhere, with pages that cannot be read.
func TestRangeSumsAreThoseOfTheBytes(t *testing.T) {
	rng := rand.New(rand.NewPCG(testSeed(t), 0))
	for round := range 20 {
		content := make([]byte, 1+rng.IntN(20*pageSize))
		for i := range content {
			content[i] = byte(rng.Uint32())
		}
		mem := vfs.NewMem()
		f := mustCreateFile(t, mem, "file", content)
		faulty := vfs.NewFaulty(mem)
		bad := int64(-1) // the page that cannot be read
		if round%2 == 1 {
			bad = rng.Int64N(int64(len(content))) &^ (pageSize - 1)
			faulty.Inject(vfs.Rule{Op: vfs.OpRead, Fault: vfs.Unreadable, Bytes: int(bad)})
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
		file, err := faulty.Open("file", vfs.ReadOnly)
		if err != nil {
			t.Fatal(err)
		}
		sums := rangeSums{file: file, size: int64(len(content))}
		for begin := 0; begin < len(content); begin += 1 + rng.IntN(1+len(content)/30) {
			end, seed := begin+rng.IntN(len(content)-begin+1), rng.Uint32()
			lost := bad >= 0 && int64(begin) < bad+pageSize && int64(end) > bad
			if bad >= 0 && int64(begin)&^(pageSize-1) == bad {
				continue // the header of a record is read before its sum is asked for
			}
			got, ok, err := sums.sum(seed, int64(begin), int64(end))
			if want := crc32.Update(seed, castagnoli, content[begin:end]); err != nil || ok == lost || ok && got != want {
				t.Fatalf("%d bytes, without the page at %d: the sum of %d to %d is %08x, %v, %v; want %08x", len(content), bad, begin, end, got, ok, err, want)
			}
		}
		if err := file.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

func mustCreateFile(t *testing.T, fs vfs.FS, name string, content []byte) vfs.File {
	t.Helper()
	f, err := fs.Open(name, vfs.Create)
	if err == nil {
		_, err = f.WriteAt(content, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// countedReads counts the bytes that are read.
type countedReads struct {
	vfs.FS
	read *int64
}

type countedFile struct {
	vfs.File
	read *int64
}

func (f countedReads) Open(name string, mode vfs.Mode) (vfs.File, error) {
	file, err := f.FS.Open(name, mode)
	return countedFile{file, f.read}, err
}

func (f countedFile) ReadAt(p []byte, off int64) (int, error) {
	*f.read += int64(len(p))
	return f.File.ReadAt(p, off)
}

// TestValuesThatLookLikeRecordsDelayNoStart: after the newest record are old contents of a recycled file, which a client has filled with headers
// of long records. A start after an unclean end must not read so many bytes for each of them.
func TestValuesThatLookLikeRecordsDelayNoStart(t *testing.T) {
	const segment, length, headers = 4 << 20, 2 << 20, 200
	fs := vfs.NewMem()
	a := mustStart(t, testOptions(fs, segment))
	last, err := a.put(bodyOf(1, 500))
	if err != nil {
		t.Fatal(err)
	}
	fs = fs.Crash(1, vfs.SurviveAll)
	rec, _ := mustReplay(t, fs, 0)
	value := make([]byte, headers*recordHeaderSize)
	for at := 0; at < len(value); at += recordHeaderSize {
		putRecordHeader(value[at:], last+2, 0, last+1)
		binary.LittleEndian.PutUint32(value[at+4:], length)
	}
	patch(t, fs, rec.tail.file, rec.tail.offset, value)
	read := int64(0)
	got, _, err := replayAll(countedReads{fs, &read}, 0)
	if err != nil || got.Last != last {
		t.Fatalf("the log ends at epoch %d: %v", got.Last, err)
	}
	if read > 16*segment {
		t.Errorf("a start reads %d MiB of a segment of %d MiB", read>>20, segment>>20)
	}
}

// TestLongRecordsProveWhatIsBeforeThem: one bit of any record but the last is damage, whatever the lengths of the records after it are.
func TestLongRecordsProveWhatIsBeforeThem(t *testing.T) {
	rng := rand.New(rand.NewPCG(testSeed(t), 0))
	fs := vfs.NewMem()
	a := mustStart(t, testOptions(fs, 256<<10))
	for i := range 8 {
		if _, err := a.put(bodyOf(uint64(i), pageSize+rng.IntN(3*pageSize))); err != nil {
			t.Fatal(err)
		}
	}
	fs = fs.Crash(1, vfs.SurviveAll)
	rec, _ := mustReplay(t, fs, 0)
	all := locationsOf(t, fs, rec)
	for i, r := range all[:len(all)-1] {
		undo := patch(t, fs, r.file, r.off+rng.Int64N(int64(r.space)), []byte{byte(rng.Uint32())})
		var damage *CorruptionError
		if _, got, err := replayAll(fs, 0); err == nil && got.last() == all[len(all)-1].epoch {
			undo() // the byte was that before, or is after the body
			continue
		} else if !errors.As(err, &damage) || damage.Epoch != r.epoch {
			t.Fatalf("record %d of %d: %v", i, len(all), err)
		}
		undo()
	}
}
