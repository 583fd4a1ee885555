package wal

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// crafted is a segment that a test writes record by record.
type crafted struct {
	header
	buffer []byte
	at     int
	next   keys.Epoch
}

func craft(number uint64, first keys.Epoch, previous, term keys.Term) *crafted {
	c := &crafted{
		header: header{version: version2, identity: 0x1122334455667788 + number, number: number, first: first, history: history{term, previous, prefixOf(testLineage)}},
		buffer: make([]byte, SegmentBytesMin), at: headerPage, next: first,
	}
	putHeader(c.buffer, c.header)
	return c
}

func (c *crafted) record(flags uint8, body ...byte) *crafted {
	length := recordHeaderSize + len(body)
	rec := c.buffer[c.at : c.at+int(recordSpace(uint32(length)))]
	copy(rec[recordHeaderSize:], body)
	sealRecord(rec, seedOf(c.identity), uint32(length), c.next, flags, c.next-1)
	c.at += len(rec)
	if holdsEpoch(flags) {
		c.next++
	}
	return c
}

// plain adds records whose bodies are one letter.
func (c *crafted) plain(letters string) *crafted {
	for i := range letters {
		c.record(0, letters[i])
	}
	return c
}

func (c *crafted) terms(next, previous uint64) *crafted {
	return c.record(flagTerm, binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, next), previous)...)
}

func (c *crafted) config(batch, change string) *crafted {
	body := binary.LittleEndian.AppendUint32(nil, uint32(len(batch)))
	return c.record(flagConfig, append(append(body, batch...), change...)...)
}

func (c *crafted) closed(successor uint64) *crafted {
	return c.record(flagClose, binary.LittleEndian.AppendUint64(nil, successor)...)
}

// craftedLog is a log of crafted segments.
func craftedLog(t *testing.T, segments ...*crafted) *vfs.Mem {
	t.Helper()
	fs := vfs.NewMem()
	if err := fs.MkdirAll(Dir(testDir)); err != nil {
		t.Fatal(err)
	}
	for _, c := range segments {
		writeSegment(t, fs, c.number, c.buffer)
	}
	return fs
}

func writeSegment(t *testing.T, fs vfs.FS, number uint64, b []byte) {
	t.Helper()
	f, err := fs.Open(Dir(testDir)+"/"+FileName(number), vfs.Create)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt(b, 0); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
}

// letters are the bodies of a replay.
func letters(fs vfs.FS, after keys.Epoch, proof Proof) (got string, rec Recovery, err error) {
	var b strings.Builder
	rec, err = Replay(fs, testDir, after, proof, func(_ keys.Epoch, body []byte) error {
		b.Write(body)
		return nil
	})
	return b.String(), rec, err
}

// TestReplayFollowsTheNewestSegments: the records before the limit of each segment, in epoch order, are the history; a hole
// before a limit is damage, and so is an overlap that no change of term explains.
func TestReplayFollowsTheNewestSegments(t *testing.T) {
	hole := craft(1, 1, 0, 0).plain("abcdef")
	hole.buffer[headerPage+2*32+recordHeaderSize] ^= 1
	torn := craft(1, 1, 0, 0).plain("abcdef")
	torn.buffer[headerPage+4*32+recordHeaderSize] ^= 1
	unreadable := craft(2, 4, 0, 1).plain("DEF")
	unreadable.buffer[3] ^= 1
	old := craft(2, 4, 0, 0)
	old.version, old.history = version1, history{}
	putHeader(old.buffer, old.header)
	for name, c := range map[string]struct {
		segments []*crafted
		after    keys.Epoch
		want     string
		damage   string // in the error
	}{
		"one tail":                     {segments: []*crafted{craft(1, 1, 0, 0).plain("abcdef"), craft(2, 4, 0, 1).plain("DE")}, want: "abcDE"},
		"close records":                {segments: []*crafted{craft(1, 1, 0, 0).plain("abcdef").closed(2), craft(2, 4, 0, 1).plain("DE").closed(3), craft(3, 6, 1, 1).plain("F")}, want: "abcDEF"},
		"nothing but a header":         {segments: []*crafted{craft(1, 1, 0, 0).plain("abcdef"), craft(2, 4, 0, 1)}, want: "abc"},
		"whole segments":               {segments: []*crafted{craft(1, 1, 0, 0).plain("abc"), craft(2, 4, 0, 0).plain("def"), craft(3, 7, 0, 0).plain("ghi"), craft(4, 3, 0, 1).plain("CD")}, want: "abCD"},
		"twice":                        {segments: []*crafted{craft(1, 1, 0, 0).plain("abcdef"), craft(2, 4, 0, 2).plain("DEF"), craft(3, 5, 2, 3).plain("5")}, want: "abcD5"},
		"twice, the second farther":    {segments: []*crafted{craft(1, 1, 0, 0).plain("abcdef"), craft(2, 4, 0, 2).plain("DEF"), craft(3, 2, 0, 1).plain("2")}, want: "a2"},
		"a term record":                {segments: []*crafted{craft(1, 1, 0, 0).plain("ab").terms(4, 0).plain("cd"), craft(2, 4, 4, 5).plain("DE")}, want: "abcDE"},
		"a term record before the end": {segments: []*crafted{craft(1, 1, 0, 0).plain("abc").terms(4, 0), craft(2, 4, 0, 4).plain("d")}, want: "abcd"},
		"a tail with a bad record":     {segments: []*crafted{torn, craft(2, 4, 0, 1).plain("DE")}, want: "abcDE"},
		"from the middle":              {segments: []*crafted{craft(1, 1, 0, 0).plain("abcdef"), craft(2, 4, 0, 1).plain("DE")}, after: 4, want: "E"},
		"a config record":              {segments: []*crafted{craft(1, 1, 0, 0).plain("a").config("b", "change").plain("c")}, want: "abc"},

		"a hole before the limit":      {segments: []*crafted{hole, craft(2, 4, 0, 1).plain("DE")}, damage: "proves that this record was durable"},
		"an overlap in the same term":  {segments: []*crafted{craft(1, 1, 0, 0).plain("abcdef"), craft(2, 4, 0, 0).plain("DE")}, damage: "in the same term"},
		"an overlap of version 1":      {segments: []*crafted{craft(1, 1, 0, 0).plain("abcdef"), old}, damage: "proves that this record was durable"},
		"a superseding header is lost": {segments: []*crafted{craft(1, 1, 0, 0).plain("abcdef").closed(3), craft(3, 7, 1, 1).plain("g")}, damage: "follows an epoch of term 1"},
		"an unreadable later header":   {segments: []*crafted{craft(1, 1, 0, 0).plain("abcdef"), unreadable}, damage: "magic"},
		"a term record out of order":   {segments: []*crafted{craft(1, 1, 0, 3).plain("a").terms(5, 2).plain("b")}, damage: "from term 2 to 5"},
		"a term that falls":            {segments: []*crafted{craft(1, 1, 0, 3).plain("a").terms(2, 3).plain("b")}, damage: "from term 3 to 2"},
	} {
		t.Run(name, func(t *testing.T) {
			got, rec, err := letters(craftedLog(t, c.segments...), c.after, Proof{})
			switch {
			case c.damage != "":
				if !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), c.damage) {
					t.Fatalf("%q, %v", got, err)
				}
				if name == "an unreadable later header" && got != "" {
					t.Fatalf("%q was replayed although a later segment may supersede it", got)
				}
			case err != nil || got != c.want || rec.Last != c.after+keys.Epoch(len(c.want)):
				t.Fatalf("%q up to %d, %v; want %q", got, rec.Last, err, c.want)
			}
		})
	}
}

// TestToolsReadOnlyTheHistory: what reads segments one by one sees no superseded record either.
func TestToolsReadOnlyTheHistory(t *testing.T) {
	fs := craftedLog(t, craft(1, 1, 0, 0).plain("abc"), craft(2, 4, 0, 0).plain("def"), craft(3, 3, 0, 1).plain("CD"))
	segments, err := Segments(fs, testDir)
	if err != nil {
		t.Fatal(err)
	}
	var got []byte
	for _, s := range segments {
		if err := ReadSegment(fs, s, func(r Record) error {
			got = append(got, r.Batch()...)
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	if string(got) != "abCD" || !segments[1].Superseded() || segments[0].Superseded() {
		t.Fatalf("%q", got)
	}
}

func TestLogOfAnotherLineageIsRefusedByName(t *testing.T) {
	fs := craftedLog(t, craft(1, 1, 0, 0).plain("ab"))
	other := keys.Lineage{0xa1, 0xb2, 0xc3, 0xd5}
	for _, proof := range []Proof{{Lineage: other}, {NoLineage: true}} {
		var refused *LineageError
		if _, _, err := letters(fs, 0, proof); !errors.As(err, &refused) || !strings.HasSuffix(refused.File, FileName(1)) || !strings.Contains(err.Error(), "a1b2c3d4") {
			t.Fatalf("%v", err)
		}
		if _, err := Repair(fs, testDir, 0, proof); !errors.As(err, &refused) {
			t.Fatalf("a repair removes what belongs to another store: %v", err)
		}
	}
	if got, _, err := letters(fs, 0, Proof{Lineage: testLineage}); err != nil || got != "ab" {
		t.Fatal(got, err)
	}
	if _, _, err := letters(fs, 0, Proof{Lineage: testLineage, Term: 2}); !errors.Is(err, ErrCorrupt) {
		t.Fatalf("the data file and the log have different terms: %v", err)
	}
}

// TestUnknownRecordsAreRefused: flags that a version does not have, combinations, and bodies of another form.
func TestUnknownRecordsAreRefused(t *testing.T) {
	for name, c := range map[string]*crafted{
		"an unknown flag":         craft(1, 1, 0, 0).record(1<<6, 'a'),
		"two flags":               craft(1, 1, 0, 0).record(flagNoOp|flagConfig, make([]byte, 8)...),
		"a short term record":     craft(1, 1, 0, 0).record(flagTerm, 1),
		"a short config record":   craft(1, 1, 0, 0).record(flagConfig, 1),
		"a config record cut off": craft(1, 1, 0, 0).record(flagConfig, 9, 0, 0, 0, 'b'),
		"a load record":           craft(1, 1, 0, 0).record(flagLoad, make([]byte, loadBodyBytes)...),
		"a short load record":     craft(1, 1, 0, 0).record(flagLoad, make([]byte, loadBodyBytes-1)...),
	} {
		if _, _, err := letters(craftedLog(t, c), 0, Proof{}); !errors.Is(err, ErrVersion) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, flags := range []uint8{flagTerm, flagConfig, flagLoad} {
		c := craft(1, 1, 0, 0).record(flags, make([]byte, loadBodyBytes)...)
		c.version, c.history = version1, history{}
		putHeader(c.buffer, c.header)
		if _, _, err := letters(craftedLog(t, c), 0, Proof{}); !errors.Is(err, ErrVersion) {
			t.Errorf("flags %d in version 1: %v", flags, err)
		}
	}
}

const goldenVersion2 = "testdata/segment-v2.golden"

// TestVersion2BytesAreTheGoldenOnes: a segment with every kind of record.
func TestVersion2BytesAreTheGoldenOnes(t *testing.T) {
	c := craft(2, 0x0102030405, 3, 4).plain("a").terms(6, 4).config("bc", "change").record(flagNoOp, 0, 0)
	c.record(flagSkip, binary.LittleEndian.AppendUint64(nil, uint64(c.next+EpochWindow))...)
	c.next += EpochWindow
	c.record(flagLoad, bytes.Repeat([]byte{7}, loadBodyBytes)...).closed(3)
	if *update {
		if err := os.WriteFile(goldenVersion2, c.buffer, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(goldenVersion2)
	if err != nil || !bytes.Equal(want, c.buffer) {
		t.Fatalf("the format has changed, %v", err)
	}
	fs := vfs.NewMem()
	if err := fs.MkdirAll(Dir(testDir)); err != nil {
		t.Fatal(err)
	}
	writeSegment(t, fs, 2, want)
	segments, err := Segments(fs, testDir)
	if err != nil || len(segments) != 1 {
		t.Fatal(segments, err)
	}
	var flags []uint8
	if err := ReadSegment(fs, segments[0], func(r Record) error {
		flags = append(flags, r.Flags)
		return nil
	}); err != nil || !slices.Equal(flags, []uint8{0, flagTerm, flagConfig, flagNoOp, flagSkip, flagLoad, flagClose}) {
		t.Fatal(flags, err)
	}
	if s := segments[0]; s.term != 4 || s.previousTerm != 3 || s.lineage != prefixOf(testLineage) || s.First != 0x0102030405 {
		t.Fatalf("%+v", s)
	}
}
