package backup

import (
	"bytes"
	"encoding/hex"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/testseed"
)

// testTable is a table that is made and read without a store.
func (f *fixture) testTable(entries []tableEntry) *Manifest {
	f.t.Helper()
	m := &Manifest{Format: manifestFormat, ID: "table", State: State{PageSize: 512, PageCount: 1 << 40}}
	m.State.Lineage = f.dir
	return f.forge(m, entries)
}

// TestPageTablesAreReadAsTheyWereWritten: runs that end with frames and parts, holes everywhere, and the look-up of pages that are there and are not.
func TestPageTablesAreReadAsTheyWereWritten(t *testing.T) {
	testseed.SkipUnderRace(t)
	f := newFixture(t)
	rng := rand.New(rand.NewPCG(3, 4))
	for name, hole := range map[string]int{"one run": 0, "few runs": 10_000, "every page a run": 1} {
		if exhaustiveStep > 1 && hole != 1 {
			continue
		}
		var want []tableEntry
		for id := page.ID(2); id < 2*tablePages+5; id++ {
			if hole == 0 || hole == 1 && id%2 == 0 || hole > 1 && rng.IntN(hole) > 0 {
				want = append(want, tableEntry{id, rng.Uint32()})
			}
		}
		m := f.testTable(want)
		if len(m.Table) != 3 || m.Table[0].Last >= tablePages || m.Table[1].First < tablePages || m.Table[1].Last >= 2*tablePages {
			t.Fatalf("%s: parts %+v", name, m.Table)
		}
		if got := tableOf(t, f.target, m); !slices.Equal(got, want) {
			t.Fatalf("%s: %d pages were read, %d written", name, len(got), len(want))
		}
		sums := map[page.ID]tableEntry{}
		for _, e := range want {
			sums[e.id] = e
		}
		r := newTableReader(t.Context(), f.target, m)
		for id := page.ID(1); id < 2*tablePages+50; id += page.ID(rng.IntN(2000)) + 1 {
			e, ok, err := r.at(id)
			check(t, err)
			if was, has := sums[id]; ok != has || ok && e != was {
				t.Fatalf("%s: page %d is %v, %v", name, id, e, ok)
			}
		}
	}
}

// TestTablesOfTwoStatesShareParts: a page that changes changes the part of the table with it, and no other.
func TestTablesOfTwoStatesShareParts(t *testing.T) {
	f := newFixture(t)
	var entries []tableEntry
	for id := page.ID(2); id < 3*tablePages; id += 16 {
		entries = append(entries, tableEntry{id, uint32(id * 7)})
	}
	a := f.testTable(entries)
	entries[len(entries)/2].sum++
	b := f.testTable(entries)
	if a.Table[0] != b.Table[0] || a.Table[1] == b.Table[1] || a.Table[2] != b.Table[2] {
		t.Fatalf("%+v\n%+v", a.Table, b.Table)
	}
}

// TestTheBytesOfAPageTable: those of the document.
func TestTheBytesOfAPageTable(t *testing.T) {
	f := newFixture(t)
	m := f.testTable([]tableEntry{{2, 0x01020304}, {3, 0}, {0x0102030405, 0xfffefdfc}})
	if len(m.Table) != 2 {
		t.Fatalf("parts %+v", m.Table)
	}
	for i, want := range []string{"0200000000000000" + "02000000" + "04030201" + "00000000", "0504030201000000" + "01000000" + "fcfdfeff"} {
		var part bytes.Buffer
		check(t, readPartObject(t.Context(), f.target, m, &m.Table[i], &part))
		object := part.Bytes()
		if got, header := object[:partHeaderSize], "45504b562d505254"+"02000000"+"03000000"+"00020000"+"00000000"; hex.EncodeToString(got) != header {
			t.Fatalf("header %x, want %s", got, header)
		}
		check(t, readPart(m.Table[i].SHA256, object, partTable, 512, func(content []byte) error {
			if hex.EncodeToString(content) != want {
				t.Errorf("content %x, want %s", content, want)
			}
			return nil
		}))
	}
}

// TestGoldenTablesAreReadable: the one of the newest golden backup has a line for each page of its state.
func TestGoldenTablesAreReadable(t *testing.T) {
	target, m := golden(t)
	if got := tableOf(t, target, m); uint64(len(got)) != m.LivePages {
		t.Fatalf("%d pages, the state has %d", len(got), m.LivePages)
	}
	part, err := os.ReadFile(filepath.Join(goldenDir, partName(m.dir(), m.Table[0].SHA256)))
	check(t, err)
	if header := partHeader(partTable, 512); !bytes.Equal(part[:partHeaderSize], header) {
		t.Fatalf("header %x, want %x", part[:partHeaderSize], header)
	}
}

// FuzzPageTable reads arbitrary bytes as the runs of a table: no panic, pages ascend, and every error is damage.
func FuzzPageTable(f *testing.F) {
	f.Add([]byte{2, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 9, 9, 9, 9})
	f.Add([]byte{2, 0, 0, 0, 0, 0, 0, 0, 255, 255, 255, 255, 9, 9, 9, 9})
	f.Add([]byte{255, 255, 255, 255, 255, 255, 255, 255, 1, 0, 0, 0, 9, 9, 9, 9})
	f.Add([]byte{2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0})
	f.Add([]byte{2, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 9, 9, 9, 9})
	f.Add([]byte{2, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 9, 9, 9, 9, 2, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 9, 9, 9, 9})
	f.Fuzz(func(t *testing.T, p []byte) {
		m := &Manifest{ID: "x", State: State{PageCount: 1 << 20}}
		r := &tableReader{m: m, part: &Part{SHA256: "y"}, runs: p}
		for last := page.ID(0); ; {
			e, ok, err := r.read()
			if err != nil && !errors.Is(err, ErrDamaged) {
				t.Fatal(err)
			}
			if !ok {
				return
			}
			if e.id <= last || e.id >= 1<<20 {
				t.Fatalf("page %d after %d", e.id, last)
			}
			last = e.id
		}
	})
}
