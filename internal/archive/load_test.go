package archive

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/objectstore"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

const loadedAt = 1_700_000_000_000_600

// sampleLoad is a bulk load of n entries in objects of about some bytes: its description, and the objects.
func sampleLoad(t testing.TB, n int, objectBytes int64) (Load, [][]byte) {
	t.Helper()
	w := newRunWriter(testLineage, 5000, loadedAt)
	var all [][]byte
	end := func() {
		o, data, err := w.object()
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, bytes.Clone(data))
		w.load.Objects = append(w.load.Objects, o)
	}
	w.begin()
	for i := range n {
		if w.size() >= objectBytes {
			end()
			w.begin()
		}
		if err := w.append(fmt.Appendf(nil, "key %03d", i), bytes.Repeat([]byte("value "), i%20)); err != nil {
			t.Fatal(err)
		}
	}
	end()
	return w.finish(), all
}

// withLoad is a list of records with a bulk load and a commit after them.
func withLoad(t testing.TB, list []Record) []Record {
	load, _ := sampleLoad(t, 10, 200)
	term := list[len(list)-1].Term
	return append(list[:len(list):len(list)], Record{Epoch: 5000, Term: term, Load: true, Body: load.append(nil)}, Record{Epoch: 5001, Term: term, Body: body(t, loadedAt+1, "after", nil)})
}

// TestFilesWithBulkLoadsAreWhatTheDocumentSays: they have version 2, and the golden ones stay readable.
func TestFilesWithBulkLoadsAreWhatTheDocumentSays(t *testing.T) {
	h, list := sample(t)
	list = withLoad(t, list)
	load, objects := sampleLoad(t, 10, 200)
	_, data := write(t, h, list)
	written := map[string][]byte{"testdata/archive-2.golden": data, "testdata/load-1.golden": objects[1]}
	for golden, data := range written {
		if *update {
			if err := os.WriteFile(golden, data, 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	want, err := os.ReadFile("testdata/archive-2.golden")
	if err != nil {
		t.Fatal(err)
	}
	h.Loads = true
	for name, file := range map[string][]byte{"written": data, "golden": want} {
		header, got, found, err := read(file)
		if err != nil || header != h || found.Loads != 1 || found.Newest.UnixMicro() != loadedAt+1 || len(got) != len(list) || got[5].Link() != list[5].Link() || !got[5].Load {
			t.Fatalf("%s: %+v, %+v, %v", name, header, found, err)
		}
	}
	if !bytes.Equal(data[:headerSize], want[:headerSize]) || data[8] != 2 {
		t.Fatalf("header %x, want %x", data[:headerSize], want[:headerSize])
	}
	run, err := os.ReadFile("testdata/load-1.golden")
	if err != nil || !bytes.Equal(run[:runHeaderSize], objects[1][:runHeaderSize]) {
		t.Fatalf("%x, %v", objects[1][:runHeaderSize], err)
	}
	decoded, err := decodeLoad(got(t, want)[5].Body)
	if err != nil || decoded.Keys != load.Keys || decoded.Sum != load.Sum || len(decoded.Objects) != len(load.Objects) {
		t.Fatalf("%+v, %v", decoded, err)
	}
	if entries, err := readLoad(t, decoded, [][]byte{objects[0], run}, len(objects)); len(objects) == 2 && (err != nil || entries != 10) {
		t.Fatalf("%d entries, %v", entries, err)
	}
}

func got(t *testing.T, data []byte) []Record {
	t.Helper()
	_, list, _, err := read(data)
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// readLoad reads a bulk load from objects, and counts its entries.
func readLoad(t testing.TB, l Load, objects [][]byte, n int) (entries int, err error) {
	t.Helper()
	store, err := objectstore.Open("file://"+t.TempDir(), objectstore.Options{})
	if err != nil {
		t.Fatal(err)
	}
	p := &place{store, testLineage}
	for i := range n {
		if err := store.Create(t.Context(), p.name(logDir, runName(5000, l.Objects[i].SHA256)), objectstore.Bytes(objects[i])); err != nil {
			t.Fatal(err)
		}
	}
	r := newRunReader(p, 5000, l, func(body []byte) error {
		var b batch.Reader
		if err := b.Read(body); err != nil {
			return err
		}
		entries += b.Count()
		return nil
	})
	err = r.read(t.Context())
	return entries, err
}

// TestEachFlippedBitOfABulkLoadIsAnError: in any of its objects.
func TestEachFlippedBitOfABulkLoadIsAnError(t *testing.T) {
	l, objects := sampleLoad(t, 10, 200)
	if n, err := readLoad(t, l, objects, len(objects)); err != nil || n != 10 || len(objects) < 2 {
		t.Fatalf("%d entries of %d objects, %v", n, len(objects), err)
	}
	for i := range objects[0] {
		spoiled := bytes.Clone(objects[0])
		spoiled[i] ^= 1 << (i % 8)
		if err := firstObject(l, spoiled); !errors.Is(err, ErrDamaged) && !errors.Is(err, ErrNewerFormat) {
			t.Fatalf("byte %d: %v", i, err)
		}
		if err := firstObject(l, objects[0][:i]); !errors.Is(err, ErrDamaged) {
			t.Fatalf("%d bytes: %v", i, err)
		}
	}
	other := l
	other.Sum[3]++
	if _, err := readLoad(t, other, objects, len(objects)); !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), "5000") {
		t.Fatalf("another sum: %v", err)
	}
	other = l
	other.Objects = l.Objects[:1]
	if _, err := readLoad(t, other, objects, 1); !errors.Is(err, ErrDamaged) {
		t.Fatalf("without the second object: %v", err)
	}
	other.Objects = []RunObject{l.Objects[1], l.Objects[0]}
	if _, err := readLoad(t, other, [][]byte{objects[1], objects[0]}, 2); !errors.Is(err, ErrDamaged) {
		t.Fatalf("in another order: %v", err)
	}
}

// firstObject reads bytes as the first object of a bulk load.
func firstObject(l Load, data []byte) error {
	r := newRunReader(&place{lineage: testLineage}, 5000, l, func([]byte) error { return nil })
	return r.from(bytes.NewReader(data), "object", 0)
}

// FuzzRun reads arbitrary bytes as an object of a bulk load: no panic, and no memory out of proportion.
func FuzzRun(f *testing.F) {
	l, objects := sampleLoad(f, 10, 200)
	f.Add(objects[0], []byte{})
	f.Add([]byte(runMagic), []byte{3, 1, 2, 3})
	f.Fuzz(func(t *testing.T, data, raw []byte) {
		if err := firstObject(l, data); err == nil && !bytes.Equal(data, objects[0]) {
			t.Fatal("another object was taken for the first one")
		}
		w := newRunWriter(testLineage, 5000, loadedAt)
		w.begin()
		w.add(raw) // entries inside of frames that are intact
		o, framed, err := w.object()
		if err != nil {
			t.Fatal(err)
		}
		_ = firstObject(Load{Time: loadedAt, Objects: []RunObject{o}}, framed)
	})
}

// TestLinkOfABulkLoadDoesNotNameItsObjects: another archiver of the same history divides the entries in another way.
func TestLinkOfABulkLoadDoesNotNameItsObjects(t *testing.T) {
	a, _ := sampleLoad(t, 50, 200)
	b, _ := sampleLoad(t, 50, 900)
	c, _ := sampleLoad(t, 49, 900)
	link := func(l Load) Link { return (&Record{Epoch: 9, Load: true, Body: l.append(nil)}).Link() }
	if len(a.Objects) == len(b.Objects) || link(a) != link(b) || link(b) == link(c) {
		t.Fatalf("%d and %d objects, %v, %v, %v", len(a.Objects), len(b.Objects), link(a), link(b), link(c))
	}
}

// TestRunNamesAreTheirOwn: only names that runName makes are objects of bulk loads.
func TestRunNamesAreTheirOwn(t *testing.T) {
	name := runName(77, [32]byte{1, 2, 3})
	if e, ok := parseRunName(name); !ok || e != 77 {
		t.Fatal(e, ok)
	}
	for _, bad := range []string{"", "load-", name + "x", "x" + name, strings.ToUpper(name), FileName(1, 2), name[:len(name)-6] + ".run"} {
		if _, ok := parseRunName(bad); ok {
			t.Errorf("%q is taken for an object of a bulk load", bad)
		}
		if _, _, ok := ParseFileName(name); ok {
			t.Error("an object of a bulk load is taken for an archive file")
		}
	}
}

// TestLoadsOfAnyDivisionComeBack: values longer than a frame, and empty ones.
func TestLoadsOfAnyDivisionComeBack(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	w := newRunWriter(testLineage, 5000, loadedAt)
	w.begin()
	var objects [][]byte
	sizes := []int{0, 1, frameRawMax - 20, frameRawMax + 5, 3 * frameRawMax, 0, 17, 100_000}
	for i, n := range sizes {
		value := make([]byte, n)
		for j := range value {
			value[j] = byte(rng.Uint32())
		}
		if err := w.append(fmt.Appendf(nil, "key %03d", i), value); err != nil {
			t.Fatal(err)
		}
		if i%3 == 2 || i == len(sizes)-1 {
			o, data, err := w.object()
			if err != nil {
				t.Fatal(err)
			}
			objects = append(objects, bytes.Clone(data))
			w.load.Objects = append(w.load.Objects, o)
			w.begin()
		}
	}
	if n, err := readLoad(t, w.finish(), objects, len(objects)); err != nil || n != len(sizes) {
		t.Fatalf("%d entries, %v", n, err)
	}
}
