package page

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
)

// referenceLeaf builds a leaf entry by entry, with the prefix known from the beginning.
func referenceLeaf(p []byte, checkpoint uint64, entries []Entry) keys.Epoch {
	n := len(entries)
	first := entries[0].Key
	pl := sharedPrefix(first, entries[n-1].Key)
	clear(p[:treeHeaderSize])
	copy(p[treeHeaderSize+n:], first[:pl])
	offsets := offsetsAt(n, pl)
	clear(p[treeHeaderSize+n+pl : offsets])
	heads := offsets + 2*(n+1)
	at := heads + 4*n
	var newest keys.Epoch
	var h uint32
	var fingerprint byte
	for i := range entries {
		e := &entries[i]
		suffix := e.Key[pl:]
		if i > 0 && e.Same {
			suffix = nil
		} else {
			h, fingerprint = head(suffix), Fingerprint(e.Key)
		}
		p[treeHeaderSize+i] = fingerprint
		binary.LittleEndian.PutUint32(p[heads+4*i:], h)
		binary.LittleEndian.PutUint16(p[offsets+2*i:], uint16(at))
		s := uint16(len(suffix)&suffixLenLow | len(suffix)>>14<<15)
		if e.Large {
			s |= flagLarge
		}
		binary.LittleEndian.PutUint64(p[at:], uint64(e.Trailer))
		binary.LittleEndian.PutUint16(p[at+8:], s)
		at += entryHeader
		at += copy(p[at:], suffix)
		at += copy(p[at:], e.Value)
		newest = max(newest, e.Trailer.Epoch())
	}
	binary.LittleEndian.PutUint16(p[offsets+2*n:], uint16(at))
	clear(p[at:])
	PutHeader(p, Header{Type: TypeLeaf, Checkpoint: checkpoint, Newest: newest})
	putTreeHeader(p, n, pl, 0)
	return newest
}

// BuildLeaf builds a leaf with a draft.
func BuildLeaf(p []byte, checkpoint uint64, entries []Entry) keys.Epoch {
	var d Draft
	for i := range entries {
		if !d.Add(&entries[i], math.MaxInt) {
			panic("an entry was refused")
		}
	}
	return d.Build(p, checkpoint)
}

// TestDraftsBuildWhatTheirEntriesAre fills drafts with entries, runs of old leaves, and other drafts, and compares each page with that
// of the reference, and each refusal with the size that the page would have.
func TestDraftsBuildWhatTheirEntriesAre(t *testing.T) {
	var d, other Draft // used again and again
	for seed := range uint64(3000) {
		rng := rand.New(rand.NewPCG(seed, 5))
		size := []int{512, 4096, 65536}[seed%3]
		entries := randomEntries(rng, size)
		limit := Payload(size)
		old := oldLeaves(rng, entries, size)
		drafts, from := []*Draft{&d, &other}, 0
		d.Reset()
		other.Reset()
		var parts [2][]Entry
		for i, x := range drafts {
			end := len(entries)
			if i == 0 {
				end = rng.IntN(len(entries) + 1)
			}
			parts[i] = entries[from:end]
			for from < end {
				from += fill(t, rng, x, old, entries, from, end)
			}
		}
		for i, x := range drafts {
			if len(parts[i]) > 0 {
				mustBuild(t, fmt.Sprintf("seed %d, draft %d", seed, i), x, parts[i], size)
			}
		}
		if len(parts[0]) > 0 && len(parts[1]) > 0 {
			if smaller := pageBytes(entries) - 1; d.Join(&other, smaller) {
				t.Fatalf("seed %d: joined to more than %d bytes", seed, smaller)
			}
			if !d.Join(&other, limit) {
				t.Fatalf("seed %d: not joined", seed)
			}
			mustBuild(t, fmt.Sprintf("seed %d, joined", seed), &d, entries, size)
		}
	}
}

// TestDraftsOfLongKeysAreSmall: a page has thousands of the longest keys, if they share nearly all of their bytes. A draft of them has no more than it
// needs, however the entries came into it, and whatever the leaf before has shared.
func TestDraftsOfLongKeysAreSmall(t *testing.T) {
	const size, n = 64 << 10, 1600
	long := bytes.Repeat([]byte("k"), 16<<10)
	entries := make([]Entry, n)
	for i := range entries {
		entries[i] = Entry{Key: fmt.Appendf(long[:len(long)-8:len(long)-8], "%08d", i), Trailer: keys.MakeTrailer(7, keys.KindSet), Value: []byte{byte(i)}}
	}
	old := make([]byte, size)
	referenceLeaf(old, 3, entries[n/2:])
	layout := Leaf(old).Layout()
	for _, row := range []struct {
		name string
		fill func(d *Draft)
	}{
		{"one by one", func(d *Draft) {
			for i := range entries {
				d.Add(&entries[i], Payload(size))
			}
		}},
		{"a run after others", func(d *Draft) {
			for i := range n / 2 {
				d.Add(&entries[i], Payload(size))
			}
			d.AddRun(&layout, 0, n/2, Payload(size))
		}},
		{"a run after one", func(d *Draft) {
			d.Add(&entries[0], Payload(size))
			d.AddRun(&layout, 0, n/2, Payload(size))
		}},
		{"one draft after another", func(d *Draft) {
			var o Draft
			d.Add(&entries[0], Payload(size))
			o.AddRun(&layout, 0, n/2, Payload(size))
			if !d.Join(&o, Payload(size)) {
				t.Error("not joined")
			}
			if got := cap(o.data) + cap(o.spare); got > 4*draftBytesMax {
				t.Errorf("the other draft takes %d bytes", got)
			}
		}},
	} {
		var d Draft
		row.fill(&d)
		got := entries
		if d.Count() < n {
			got = append(entries[:1:1], entries[n/2:]...)
		}
		mustBuild(t, row.name, &d, got, size)
		if got := cap(d.data) + cap(d.spare); got > 4*draftBytesMax {
			t.Errorf("%s: the draft takes %d bytes", row.name, got)
		}
	}
}

// pageBytes is the size of a leaf of the entries.
func pageBytes(entries []Entry) int {
	var s LeafSize
	for i := range entries {
		s.Add(&entries[i])
	}
	return s.Bytes()
}

// oldLeaf is a leaf with entries [from, to) of a test.
type oldLeaf struct {
	LeafLayout
	from, to int
}

// oldLeaves divides the entries into leaves.
func oldLeaves(rng *rand.Rand, entries []Entry, size int) (old []oldLeaf) {
	for from := 0; from < len(entries); {
		to := from + 1 + rng.IntN(len(entries)-from)
		p := make([]byte, size)
		referenceLeaf(p, 3, entries[from:to])
		old = append(old, oldLeaf{Leaf(p).Layout(), from, to})
		from = to
	}
	return old
}

// fill adds at least one of the entries [from, end) to d, and returns how many.
func fill(t *testing.T, rng *rand.Rand, d *Draft, old []oldLeaf, entries []Entry, from, end int) int {
	t.Helper()
	for _, l := range old {
		if from < l.from || from >= l.to || entries[from].Same || rng.IntN(3) == 0 {
			continue
		}
		to := min(l.to, end)
		n := l.SoleVersions(from-l.from, to-l.from)
		if end < len(entries) && from+n == end && entries[end].Same {
			n-- // its next version is in the other draft
		}
		if n <= 0 {
			break
		}
		n = 1 + rng.IntN(n)
		limit := math.MaxInt
		want := n
		if rng.IntN(2) == 0 {
			limit = d.Bytes() + rng.IntN(400)
			want = fitting(d, entries[from:from+n], limit)
		}
		if got := d.AddRun(&l.LeafLayout, from-l.from, from-l.from+n, limit); got != want {
			t.Fatalf("%d of a run of %d fit into %d bytes, want %d", got, n, limit, want)
		} else if got > 0 {
			return got
		}
	}
	e := entries[from]
	if with := d.size.With(&e); d.Count() > 0 && d.Add(&e, with-1) {
		t.Fatalf("an entry that makes %d bytes fits into fewer", with)
	} else if !d.Add(&e, with) {
		t.Fatalf("an entry that makes %d bytes does not fit", with)
	}
	return 1
}

// fitting is how many of the entries fit after those of d.
func fitting(d *Draft, entries []Entry, limit int) (n int) {
	s := d.size
	for i := range entries {
		if s.With(&entries[i]) > limit && s.count > 0 {
			break
		}
		s.Add(&entries[i])
		n++
	}
	return n
}

func mustBuild(t *testing.T, name string, d *Draft, entries []Entry, size int) {
	t.Helper()
	got, want := make([]byte, size), make([]byte, size)
	for i := range got {
		got[i] = 0xa5 // pages are used again
	}
	first, trailer := d.First()
	if !bytes.Equal(first, entries[0].Key) || trailer != entries[0].Trailer {
		t.Fatalf("%s: the first entry is %q", name, first)
	}
	if last := &entries[len(entries)-1]; !bytes.Equal(d.LastKey(nil), last.Key) || d.LastTrailer() != last.Trailer {
		t.Fatalf("%s: the last entry is %q", name, d.LastKey(nil))
	}
	if n := pageBytes(entries); d.Bytes() != n || d.Count() != len(entries) {
		t.Fatalf("%s: %d bytes, want %d", name, d.Bytes(), n)
	}
	decoded, _ := d.Entries(nil, nil)
	for i, e := range decoded {
		if w := &entries[i]; !bytes.Equal(e.Key, w.Key) || !bytes.Equal(e.Value, w.Value) || e.Trailer != w.Trailer || e.Same != w.Same || e.Large != w.Large {
			t.Fatalf("%s: entry %d is %+v, want %+v", name, i, e, *w)
		}
	}
	newest := d.Build(got, 7)
	if want := referenceLeaf(want, 7, entries); newest != want {
		t.Fatalf("%s: newest epoch %d, want %d", name, newest, want)
	}
	if !bytes.Equal(got, want) {
		t.Fatalf("%s: the page differs", name)
	}
}
