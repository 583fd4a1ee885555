package archive

import (
	"bytes"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"os"
	"runtime"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/testseed"
)

var update = flag.Bool("update", false, "rewrite golden files; goes with docs/formats.md and a decision about the version")

var testLineage = keys.Lineage{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}

// body is a batch body that sets a key.
func body(t testing.TB, at uint64, key string, value []byte) []byte {
	t.Helper()
	var b batch.Builder
	b.Set(keys.SpaceUser, []byte(key), value)
	b.SetHeader(batch.Header{Time: at})
	built, err := b.Finish()
	if err != nil {
		t.Fatal(err)
	}
	return bytes.Clone(built.Bytes())
}

// write makes a file of records.
func write(t testing.TB, h Header, list []Record) (Info, []byte) {
	t.Helper()
	w := NewWriter()
	w.Reset(h)
	for i := range list {
		if err := w.Append(&list[i]); err != nil {
			t.Fatal(err)
		}
	}
	info, data := w.Finish()
	return info, bytes.Clone(data)
}

// read reads a whole file.
func read(data []byte) (h Header, list []Record, info Info, err error) {
	r, err := NewReader("test.elog", bytes.NewReader(data))
	if err != nil {
		return h, nil, info, err
	}
	for {
		rec, err := r.Next()
		if errors.Is(err, io.EOF) {
			return r.Header(), list, r.Info(), nil
		}
		if err != nil {
			return r.Header(), list, info, err
		}
		rec.Body = bytes.Clone(rec.Body)
		list = append(list, rec)
	}
}

// sample is a file with every kind of record.
func sample(t testing.TB) (Header, []Record) {
	return Header{Lineage: testLineage, First: 8, Begin: Linked, Link: Link{7, 2, 0x12345678}, Level: 2}, []Record{
		{Epoch: 8, Term: 2, Body: body(t, 1_700_000_000_000_000, "first", []byte("value"))},
		{Epoch: 9, Term: 2},
		{Epoch: 1000, Term: 2, Skipped: true},
		{Epoch: 1001, Term: 5, Body: body(t, 1_700_000_000_000_500, "second", bytes.Repeat([]byte("long "), 40))},
		{Epoch: 1002, Term: 5, Body: body(t, 1_700_000_000_000_400, "third", nil)},
	}
}

func same(a, b []Record) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i].Epoch != b[i].Epoch || a[i].Term != b[i].Term || a[i].Skipped != b[i].Skipped || !bytes.Equal(a[i].Body, b[i].Body) {
			return false
		}
	}
	return true
}

// TestFileIsWhatTheDocumentSays compares a file with the golden one. The compressed bytes may change with the library, so the
// golden file is read, too: files of old programs stay readable.
func TestFileIsWhatTheDocumentSays(t *testing.T) {
	const golden = "testdata/archive-1.golden"
	h, list := sample(t)
	info, data := write(t, h, list)
	if *update {
		if err := os.WriteFile(golden, data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	for name, file := range map[string][]byte{"written": data, "golden": want} {
		header, got, found, err := read(file)
		if err != nil || header != h || !same(got, list) {
			t.Fatalf("%s: %+v, %d records, %v", name, header, len(got), err)
		}
		if found.Count != 5 || found.Last != list[4].Link() || found.Oldest.UnixMicro() != 1_700_000_000_000_000 || found.Newest.UnixMicro() != 1_700_000_000_000_500 || found.RawBytes != info.RawBytes {
			t.Fatalf("%s: %+v", name, found)
		}
	}
	if !bytes.Equal(data[:headerSize], want[:headerSize]) {
		t.Fatalf("header %x, want %x", data[:headerSize], want[:headerSize])
	}
	cut := len(want) - trailerSize
	if got := data[len(data)-trailerSize:]; !bytes.Equal(got[:sizeOffset], want[cut:cut+sizeOffset]) {
		t.Fatalf("trailer %x, want %x", got[:sizeOffset], want[cut:cut+sizeOffset])
	}
}

// TestEachFlippedBitIsAnError: no bit of a file can change unnoticed, and what is returned before the error is right.
func TestEachFlippedBitIsAnError(t *testing.T) {
	h, list := sample(t)
	_, data := write(t, h, list)
	for i := range data {
		for bit := range 8 {
			spoiled := bytes.Clone(data)
			spoiled[i] ^= 1 << bit
			_, got, _, err := read(spoiled)
			if !errors.Is(err, ErrDamaged) && !errors.Is(err, ErrNewerFormat) {
				t.Fatalf("byte %d, bit %d: %v", i, bit, err)
			}
			if len(got) > len(list) || !same(got, list[:len(got)]) {
				t.Fatalf("byte %d, bit %d: other records", i, bit)
			}
			if i < len(data)-trailerSize {
				continue
			}
			if _, err := decodeTrailer("test", int64(len(data)), spoiled[len(data)-trailerSize:]); err == nil && i < len(data)-trailerSize+hashOffset {
				t.Fatalf("byte %d, bit %d of the trailer was not noticed", i, bit)
			}
		}
	}
}

// TestFileThatIsCutOrLongerIsAnError: a file of any other length is refused.
func TestFileThatIsCutOrLongerIsAnError(t *testing.T) {
	h, list := sample(t)
	_, data := write(t, h, list)
	for n := range data {
		if _, _, _, err := read(data[:n]); !errors.Is(err, ErrDamaged) {
			t.Fatalf("%d of %d bytes: %v", n, len(data), err)
		}
		if tail := data[max(0, n-trailerSize):n]; n >= trailerSize {
			if _, err := decodeTrailer("test", int64(n), tail); !errors.Is(err, ErrDamaged) {
				t.Fatalf("trailer at %d of %d bytes: %v", n, len(data), err)
			}
		}
	}
	for _, more := range [][]byte{{0}, data, data[len(data)-trailerSize:]} {
		if _, _, _, err := read(append(bytes.Clone(data), more...)); !errors.Is(err, ErrDamaged) {
			t.Fatalf("%d bytes more: %v", len(more), err)
		}
	}
}

// TestVersionsAndFlagsOfLaterProgramsAreRefusedAsNewer: an intact file of a later format is not damage.
func TestVersionsAndFlagsOfLaterProgramsAreRefusedAsNewer(t *testing.T) {
	h, list := sample(t)
	_, data := write(t, h, list)
	for name, change := range map[string]func(p []byte){
		"version":  func(p []byte) { p[8] = versionLoads + 1 },
		"flags":    func(p []byte) { p[12] = 1 },
		"reserved": func(p []byte) { p[70] = 1 },
		"begin":    func(p []byte) { p[beginOffset] = byte(beginCount) },
	} {
		spoiled := bytes.Clone(data)
		change(spoiled)
		binary.LittleEndian.PutUint32(spoiled[headerSumOffset:], crc32.Checksum(spoiled[:headerSumOffset], castagnoli))
		if _, _, _, err := read(spoiled); !errors.Is(err, ErrNewerFormat) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestRecordsOutOfOrderAreRefused: a file cannot be written with a hole or with an epoch twice.
func TestRecordsOutOfOrderAreRefused(t *testing.T) {
	w := NewWriter()
	w.Reset(Header{First: 5, Begin: BeginsFirst})
	for _, bad := range []Record{{Epoch: 4}, {Epoch: 6}, {Epoch: 4, Skipped: true}, {Epoch: keys.MaxEpoch + 1, Skipped: true}} {
		if err := w.Append(&bad); !errors.Is(err, ErrOrder) {
			t.Errorf("%+v: %v", bad, err)
		}
	}
	if err := w.Append(&Record{Epoch: 5, Term: 3}); err != nil {
		t.Fatal(err)
	}
	if err := w.Append(&Record{Epoch: 6, Term: 2}); !errors.Is(err, ErrOrder) {
		t.Errorf("a term that falls: %v", err)
	}
}

// TestRecordsLongerThanAFrameComeBack: bodies around the length of a frame and of several frames, compressible and not.
func TestRecordsLongerThanAFrameComeBack(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var list []Record
	for i, n := range []int{0, frameRawMax - 100, frameRawMax, frameRawMax + 1, 3*frameRawMax + 17, 5} {
		value := make([]byte, n)
		if i%2 == 0 {
			for j := range value {
				value[j] = byte(rng.Uint32())
			}
		}
		list = append(list, Record{Epoch: keys.Epoch(i + 1), Body: body(t, uint64(i+1), fmt.Sprint(i), value)})
	}
	h := Header{Lineage: testLineage, First: 1, Begin: BeginsGap, Level: 2}
	info, data := write(t, h, list)
	header, got, found, err := read(data)
	if err != nil || header != h || !same(got, list) || found != info {
		t.Fatalf("%+v, %d records, %v", header, len(got), err)
	}
}

// TestALargeRecordIsCopiedOnce: a file that grew step by step with it would be in memory twice with each step.
func TestALargeRecordIsCopiedOnce(t *testing.T) {
	testseed.SkipUnderRace(t) // which makes the encoder allocate more
	const record = 24 << 20
	text := make([]byte, record)
	_, _ = rand.NewChaCha8([32]byte{}).Read(text) // it cannot be compressed
	w := NewWriter()
	w.Reset(Header{First: 1, Begin: BeginsFirst})
	w.add(text[:10]) // the encoder has its memory
	w.end()
	w.reset()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	w.add(text)
	w.end()
	runtime.ReadMemStats(&after)
	if len(w.out) < record {
		t.Fatal("the record was compressed: this tests nothing")
	}
	if bytes := after.TotalAlloc - before.TotalAlloc; bytes > record+8<<20 {
		t.Errorf("a record of %d bytes allocates %d", record, bytes)
	}
}

// TestFileNamesAreTheirOwn: only names that FileName makes are archive files.
func TestFileNamesAreTheirOwn(t *testing.T) {
	if first, last, ok := ParseFileName(FileName(3, 1<<40)); !ok || first != 3 || last != 1<<40 {
		t.Fatal(first, last, ok)
	}
	for _, name := range []string{"", "x.elog", "3-4.elog", FileName(4, 3), FileName(1, 2) + "x", "000000000000000A-000000000000000B.elog", FileName(1, keys.MaxEpoch+1)} {
		if _, _, ok := ParseFileName(name); ok {
			t.Errorf("%q is taken for a file", name)
		}
	}
}

// FuzzRead reads arbitrary bytes: no panic, no memory out of proportion, and only whole files end without an error.
func FuzzRead(f *testing.F) {
	h, list := sample(f)
	_, data := write(f, h, list)
	f.Add(data)
	f.Add(data[:len(data)-1])
	f.Add([]byte(headerMagic))
	_, data = write(f, h, withLoad(f, list))
	f.Add(data)
	f.Fuzz(func(t *testing.T, data []byte) {
		header, got, info, err := read(data)
		if err != nil {
			return
		}
		if again, _ := write(t, header, got); again.Last != info.Last || again.Count != info.Count || again.RawBytes != info.RawBytes {
			t.Fatalf("%+v written again is %+v", info, again)
		}
	})
}

// FuzzRecords reads arbitrary uncompressed records inside of frames that are intact.
func FuzzRecords(f *testing.F) {
	f.Add([]byte{0, 1, 0, 200, 1, 1})
	f.Add([]byte{1, 1, 0, 0, 2, 200, 5, 0, 0})
	f.Fuzz(func(_ *testing.T, raw []byte) {
		w := NewWriter()
		w.Reset(Header{First: 1, Begin: BeginsFirst})
		w.add(raw)
		_, data := w.Finish()
		_, _, _, _ = read(data)
	})
}

// BenchmarkAppend is the cost of archiving a small commit; bytes are those of the log.
func BenchmarkAppend(b *testing.B) {
	rng := rand.New(rand.NewPCG(1, 2))
	value := make([]byte, 100)
	w, h := NewWriter(), Header{First: 1, Begin: BeginsFirst}
	w.Reset(h)
	var logged, archived int64
	b.ReportAllocs()
	for b.Loop() {
		binary.LittleEndian.PutUint64(value[50:], rng.Uint64())
		rec := Record{Epoch: w.Last().Epoch + 1, Body: body(b, 1_700_000_000_000_000+w.Count()*50, fmt.Sprintf("key %012d", rng.Uint32()), value)}
		if err := w.Append(&rec); err != nil {
			b.Fatal(err)
		}
		logged += int64(24+len(rec.Body)+7) &^ 7
		if w.Bytes() > 16<<20 {
			info, _ := w.Finish()
			archived += info.Bytes
			h.First = info.Last.Epoch + 1
			w.Reset(h)
		}
	}
	if w.Count() > 0 {
		info, _ := w.Finish()
		archived += info.Bytes
	}
	b.SetBytes(logged / int64(b.N))
	b.ReportMetric(float64(archived)/float64(logged), "archive-bytes/log-byte")
}
