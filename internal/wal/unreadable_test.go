package wal

import (
	"bytes"
	"encoding/binary"
	"errors"
	"path"
	"slices"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestUnreadablePageIsDamageWhereRecordsAre: a page that the device cannot read is damage of the record that it has a part of, which a
// repair drops with all later ones. Where no needed record is, it does not matter: most of the newest segment is not used yet.
func TestUnreadablePageIsDamageWhereRecordsAre(t *testing.T) {
	const segment = 32 << 10
	fs := vfs.NewMem()
	a := mustStart(t, testOptions(fs, segment))
	for i := range 66 {
		if _, err := a.put(bodyOf(uint64(i), 500+i)); err != nil {
			t.Fatal(err)
		}
	}
	fs = fs.Crash(1, vfs.SurviveAll)
	rec, want := mustReplay(t, fs, 0)
	all := locationsOf(t, fs, rec)
	if len(rec.Segments) != 2 {
		t.Fatalf("%d segments", len(rec.Segments))
	}
	last := all[len(all)-1]
	all = append(all, recordLocation{last.file, last.off + int64(last.space), record{epoch: last.epoch + 1, space: recordHeaderSize}}) // there may be one
	harmless := 0
	for n, s := range rec.Segments {
		for at := int64(0); at < s.Bytes; at += pageSize {
			bad := func(fs vfs.FS) *vfs.Faulty {
				faulty := vfs.NewFaulty(fs)
				faulty.Inject(vfs.Rule{Op: vfs.OpRead, Name: path.Base(s.File), Fault: vfs.Unreadable, Bytes: int(at) + 5})
				return faulty
			}
			i := slices.IndexFunc(all, func(r recordLocation) bool {
				return r.file == s.File && (at == 0 || r.off < at+pageSize && r.off+int64(r.space) > at)
			})
			from := rec.Last + 1 // the first epoch that is lost
			if i >= 0 {
				from = all[i].epoch
			} else {
				harmless++
			}
			for what, replay := range map[string]func(vfs.FS) (*replayed, error){
				"replay":  func(fs vfs.FS) (*replayed, error) { _, got, err := replayAll(fs, 0); return got, err },
				"recover": recoverAll,
			} {
				got, err := replay(bad(fs.Crash(1, vfs.SurviveProcess)))
				var damage *CorruptionError
				switch {
				case i < 0 && (err != nil || !slices.EqualFunc(got.bodies, want.bodies, bytes.Equal)):
					t.Fatalf("%s without offset %d of %s: %v", what, at, s.File, err)
				case i >= 0 && (!errors.As(err, &damage) || damage.File != s.File || damage.Epoch != from || at > 0 && damage.Offset != all[i].off):
					t.Fatalf("%s without offset %d of %s, where epoch %d is: %v", what, at, s.File, from, err)
				}
			}
			if n == 0 { // its records are in the tree
				if got, _, err := replayAll(bad(fs.Crash(1, vfs.SurviveProcess)), rec.Segments[1].First-1); err != nil || got.Last != rec.Last {
					t.Fatalf("without offset %d of %s, which is not needed: %v", at, s.File, err)
				}
			}
			copied := bad(fs.Crash(1, vfs.SurviveProcess))
			dropped, err := Repair(copied, testDir, 0, Proof{})
			if err != nil || (dropped.Cause != nil) != (i >= 0) || i >= 0 && dropped.From != from {
				t.Fatalf("repair without offset %d of %s: %+v, %v", at, s.File, dropped, err)
			}
			if _, got, err := replayAll(copied, 0); err != nil || !slices.EqualFunc(got.bodies, want.bodies[:from-1], bytes.Equal) {
				t.Fatalf("repaired without offset %d of %s: %v", at, s.File, err)
			}
		}
	}
	if harmless < 3 {
		t.Errorf("%d pages do not matter", harmless)
	}
}

func recoverAll(fs vfs.FS) (*replayed, error) {
	got := &replayed{first: 1}
	_, err := Recover(fs, testDir, 0, Proof{}, func(c Commit) error {
		got.epochs, got.bodies = append(got.epochs, c.Epoch), append(got.bodies, bytes.Clone(c.Body))
		return nil
	})
	return got, err
}

// TestUnreadableRestOfARecycledFileIsHarmless: after the newest record may be an old one, whose length reaches a page that the device cannot
// read. Only the record that comes next can have been durable there.
func TestUnreadableRestOfARecycledFileIsHarmless(t *testing.T) {
	fs := vfs.NewMem()
	a := mustStart(t, testOptions(fs, 32<<10))
	for i := range 12 {
		if _, err := a.put(bodyOf(uint64(i), 500)); err != nil {
			t.Fatal(err)
		}
	}
	fs = fs.Crash(1, vfs.SurviveAll)
	rec, _ := mustReplay(t, fs, 0)
	all := locationsOf(t, fs, rec)
	last := all[len(all)-1]
	for epoch, harmless := range map[keys.Epoch]bool{3: true, last.epoch + 1: false} {
		head := make([]byte, recordHeaderSize)
		putRecordHeader(head, epoch, 0, 2)
		binary.LittleEndian.PutUint32(head[4:], 3*pageSize)
		undo := patch(t, fs, last.file, last.off+int64(last.space), head)
		faulty := vfs.NewFaulty(fs)
		rule := faulty.Inject(vfs.Rule{Op: vfs.OpRead, Name: path.Base(last.file), Fault: vfs.Unreadable, Bytes: 4 * pageSize})
		got, _, err := replayAll(faulty, 0)
		if rule.Fired() == 0 || harmless && (err != nil || got.Last != last.epoch) || !harmless && !errors.Is(err, ErrCorrupt) {
			t.Errorf("with the header of epoch %d: last %d, %v; %d reads", epoch, got.Last, err, rule.Fired())
		}
		undo()
	}
}

// smallReads is a file system of which a read of more than a page fails, as one that meets a page that cannot be read may, wherever that is.
type smallReads struct{ vfs.FS }

type smallReadsFile struct{ vfs.File }

func (f smallReads) Open(name string, mode vfs.Mode) (vfs.File, error) {
	file, err := f.FS.Open(name, mode)
	return smallReadsFile{file}, err
}

func (f smallReadsFile) ReadAt(p []byte, off int64) (int, error) {
	if len(p) > pageSize {
		return 0, vfs.ErrDevice
	}
	return f.File.ReadAt(p, off)
}

// TestLargeReadThatFailsIsRepeatedPageByPage: the kernel may return nothing of a read because of a page at its end.
func TestLargeReadThatFailsIsRepeatedPageByPage(t *testing.T) {
	fs := vfs.NewMem()
	a := mustStart(t, testOptions(fs, 64<<10))
	for i := range 20 {
		if _, err := a.put(bodyOf(uint64(i), 100+i*500)); err != nil {
			t.Fatal(err)
		}
	}
	fs = fs.Crash(1, vfs.SurviveAll)
	_, want := mustReplay(t, fs, 0)
	if _, got, err := replayAll(smallReads{fs}, 0); err != nil || !slices.EqualFunc(got.bodies, want.bodies, bytes.Equal) {
		t.Errorf("%d of %d records: %v", len(got.bodies), len(want.bodies), err)
	}
	if got, err := recoverAll(smallReads{fs}); err != nil || len(got.bodies) != len(want.bodies) {
		t.Errorf("%d of %d records: %v", len(got.bodies), len(want.bodies), err)
	}
}

// TestReadAroundDamageGoesOn: with the intact records after what is damaged, but not with those after the end of the log, which were never
// acknowledged.
func TestReadAroundDamageGoesOn(t *testing.T) {
	const records = 60
	fs, rec, _ := smallLog(t, records, false)
	all := locationsOf(t, fs, rec)
	read := func(fs vfs.FS) (epochs []keys.Epoch) {
		segments, err := Segments(fs, testDir)
		if err != nil {
			t.Fatal(err)
		}
		for i, s := range segments {
			last := keys.Epoch(0)
			if i+1 < len(segments) {
				last = segments[i+1].First - 1
			}
			if err := ReadAroundDamage(fs, s, last, func(r Record) error {
				if r.HoldsEpoch() {
					epochs = append(epochs, r.Epoch)
				}
				return nil
			}); err != nil {
				t.Fatal(err)
			}
		}
		return epochs
	}
	for i, r := range all {
		var want []keys.Epoch
		for _, other := range all {
			if other.epoch != r.epoch {
				want = append(want, other.epoch)
			}
		}
		undo := patch(t, fs, r.file, r.off+recordHeaderSize, []byte{0xee, 0xee, 0xee})
		if got := read(fs); !slices.Equal(got, want) {
			t.Fatalf("without record %d: %v", i, got)
		}
		undo()
	}
	var want []keys.Epoch
	bad := all[len(all)/2]
	for _, other := range all {
		if other.file != bad.file || other.off/pageSize != bad.off/pageSize && (other.off+int64(other.space)-1)/pageSize != bad.off/pageSize {
			want = append(want, other.epoch)
		}
	}
	faulty := vfs.NewFaulty(fs)
	faulty.Inject(vfs.Rule{Op: vfs.OpRead, Name: path.Base(bad.file), Fault: vfs.Unreadable, Bytes: int(bad.off)})
	if got := read(faulty); !slices.Equal(got, want) {
		t.Fatalf("without a page: %v, want %v", got, want)
	}
	fs = vfs.NewMem()
	a := mustStart(t, testOptions(fs, 16<<10))
	for i := range 6 { // all with one sync
		a.mustAppend(t, bodyOf(uint64(i), 100))
	}
	if err := a.log.Flush(6); err != nil {
		t.Fatal(err)
	}
	fs = fs.Crash(1, vfs.SurviveAll)
	rec, _ = mustReplay(t, fs, 0)
	all = locationsOf(t, fs, rec)
	patch(t, fs, all[3].file, all[3].off+recordHeaderSize, []byte{0xee, 0xee, 0xee})
	if got := read(fs); !slices.Equal(got, []keys.Epoch{1, 2, 3}) {
		t.Fatalf("after an unfinished record: %v", got)
	}
}
