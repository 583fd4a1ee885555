package wal

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"path"
	"slices"
	"syscall"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// patch changes bytes of a file and returns a function that restores them.
func patch(t *testing.T, fs vfs.FS, name string, off int64, data []byte) (undo func()) {
	t.Helper()
	f, err := fs.Open(name, vfs.ReadWrite)
	if err != nil {
		t.Fatal(err)
	}
	old := make([]byte, len(data))
	if _, err := f.ReadAt(old, off); err != nil {
		t.Fatal(err)
	}
	write := func(b []byte) {
		if _, err := f.WriteAt(b, off); err != nil {
			t.Fatal(err)
		}
	}
	write(data)
	return func() {
		write(old)
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// smallLog is a log of several tiny segments in which every record was synced before the next was written. A closed log
// ends in a close record; any other log is as a killed process leaves it.
func smallLog(t *testing.T, records int, closed bool) (*vfs.Mem, Recovery, *replayed) {
	t.Helper()
	fs := vfs.NewMem()
	a := mustStart(t, testOptions(fs, SegmentBytesMin))
	for i := range records {
		if _, err := a.put(bodyOf(uint64(i), 150+i%40)); err != nil {
			t.Fatal(err)
		}
	}
	if closed {
		mustClose(t, a.log)
	} else {
		fs = fs.Crash(1, vfs.SurviveAll)
	}
	rec, want := mustReplay(t, fs, 0)
	if len(want.bodies) != records || len(rec.Segments) < 2 {
		t.Fatalf("%d records in %d segments", len(want.bodies), len(rec.Segments))
	}
	return fs, rec, want
}

// recordLocation is where a record is in the log.
type recordLocation struct {
	file string
	off  int64
	record
}

func locationsOf(t *testing.T, fs vfs.FS, rec Recovery) (all []recordLocation) {
	t.Helper()
	for _, s := range rec.Segments {
		if err := ReadSegment(fs, s, func(r Record) error {
			if r.Flags == flagClose {
				return nil
			}
			all = append(all, recordLocation{s.File, r.Offset, record{epoch: r.Epoch, durable: r.Durable, flags: r.Flags, space: recordSpace(uint32(recordHeaderSize + len(r.Body)))}})
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	return all
}

func TestDamageAtEveryByteIsDetectedOrHarmless(t *testing.T) {
	fs, rec, want := smallLog(t, 50, true)
	for _, s := range rec.Segments {
		for off := range s.Bytes {
			flip := byte(1) << (off % 8)
			var old [1]byte
			readAt(t, fs, s.File, off, old[:])
			undo := patch(t, fs, s.File, off, []byte{old[0] ^ flip})
			_, got, err := replayAll(fs, 0)
			switch {
			case errors.Is(err, ErrCorrupt) || errors.Is(err, ErrVersion):
			case err != nil:
				t.Fatalf("%s byte %d: %v", s.File, off, err)
			case !slices.EqualFunc(got.bodies, want.bodies, bytes.Equal):
				t.Fatalf("%s byte %d, bit %#x: undetected, %d of %d records", s.File, off, flip, len(got.bodies), len(want.bodies))
			}
			undo()
		}
	}
}

func readAt(t *testing.T, fs vfs.FS, name string, off int64, b []byte) {
	t.Helper()
	f, err := fs.Open(name, vfs.ReadOnly)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.ReadAt(b, off); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestDamageBelowTheDurableEpochIsCorruptionAndNamesItsOffset(t *testing.T) {
	fs, rec, want := smallLog(t, 50, false)
	all := locationsOf(t, fs, rec)
	for i, p := range all {
		for name, damage := range map[string][]byte{
			"checksum":    {0xa5, 0x5a, 0xa5, 0x5a},
			"zero word":   make([]byte, 8),
			"zero record": make([]byte, p.space),
			"zero sector": make([]byte, 512),
			"length":      {0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff},
		} {
			if end := p.off + int64(len(damage)); end > SegmentBytesMin {
				continue
			}
			undo := patch(t, fs, p.file, p.off, damage)
			got, bodies, err := replayAll(fs, 0)
			if i == len(all)-1 { // no later record could prove that it was durable: a torn tail
				if err != nil || got.Last != p.epoch-1 {
					t.Fatalf("last record, %s: last %d, %v", name, got.Last, err)
				}
				undo()
				continue
			}
			var c *CorruptionError
			// A zeroed sector includes the next records; with the last record in it there is no proof of durability.
			lost := name == "zero sector" && i >= len(all)-3
			if !errors.As(err, &c) && !lost {
				t.Fatalf("record %d, %s: %v", i, name, err)
			}
			if c != nil && (c.File != p.file || c.Offset != p.off || c.Epoch != p.epoch || c.Remedy == "") {
				t.Fatalf("record %d at %s:%d, %s: reported %+v", i, p.file, p.off, name, c)
			}
			if len(bodies.bodies) != i || !slices.EqualFunc(bodies.bodies, want.bodies[:i], bytes.Equal) {
				t.Fatalf("record %d, %s: %d records were passed on before it", i, name, len(bodies.bodies))
			}
			undo()
		}
	}
}

func TestRepairTruncatesAtTheDamageAndReportsWhatIsGone(t *testing.T) {
	for i := range 49 {
		fs, rec, want := smallLog(t, 50, false)
		p := locationsOf(t, fs, rec)[i]
		_ = patch(t, fs, p.file, p.off, []byte{0xa5, 0x5a, 0xa5, 0x5a})
		d, err := Repair(fs, testDir, 0, Proof{})
		if err != nil {
			t.Fatal(err)
		}
		if d.Cause == nil || d.From != p.epoch || d.Bytes != SegmentBytesMin-p.off {
			t.Fatalf("record %d: %+v", i, d)
		}
		again, got := mustReplay(t, fs, 0)
		if again.Torn != nil || !slices.EqualFunc(got.bodies, want.bodies[:i], bytes.Equal) {
			t.Fatalf("record %d: %d records after the repair", i, len(got.bodies))
		}
		if d, err := Repair(fs, testDir, 0, Proof{}); err != nil || d.Cause != nil || len(d.Files) != 0 {
			t.Fatalf("an intact log was repaired: %+v, %v", d, err)
		}
		a, err := startLog(testOptions2(fs), again)
		if err != nil {
			t.Fatal(err)
		}
		if e, err := a.put(bodyOf(1, 10)); err != nil || e <= 50+EpochWindow {
			t.Fatalf("after the repair: epoch %d, %v", e, err)
		}
		mustClose(t, a.log)
	}
}

func TestDamagedHeaderIsCorruptionAndRepairDropsItsFile(t *testing.T) {
	fs, rec, _ := smallLog(t, 50, false)
	last := rec.Segments[len(rec.Segments)-1]
	_ = patch(t, fs, last.File, 20, []byte{0xff, 0xff})
	_, _, err := replayAll(fs, 0)
	var c *CorruptionError
	if !errors.As(err, &c) || c.File != last.File || c.Offset != 0 || c.Epoch != last.First {
		t.Fatal(err)
	}
	d, err := Repair(fs, testDir, 0, Proof{})
	if err != nil || d.From != last.First || len(d.Files) != 1 || d.Files[0] != last.File {
		t.Fatalf("%+v, %v", d, err)
	}
	if _, got := mustReplay(t, fs, 0); got.last() != last.First-1 {
		t.Fatalf("last %d", got.last())
	}
}

func TestDamageBeforeTheStartOfReplayDoesNotMatter(t *testing.T) {
	fs, rec, _ := smallLog(t, 80, false)
	_ = patch(t, fs, rec.Segments[0].File, 0, []byte("not a log"))
	_ = patch(t, fs, rec.Segments[1].File, headerPage+40, []byte("damage"))
	after := rec.Segments[2].First - 1
	if got, _ := mustReplay(t, fs, after); got.Last != 80 {
		t.Fatalf("last %d", got.Last)
	}
}

func TestMissingSegmentIsCorruption(t *testing.T) {
	for i := range 2 {
		fs, rec, _ := smallLog(t, 80, false)
		if err := fs.Remove(rec.Segments[i].File); err != nil {
			t.Fatal(err)
		}
		_, _, err := replayAll(fs, 0)
		var c *CorruptionError
		if !errors.As(err, &c) || c.Epoch != rec.Segments[i].First {
			t.Fatalf("segment %d: %v", i, err)
		}
		if i == 0 {
			mustReplay(t, fs, rec.Segments[1].First-1)
		}
	}
}

func TestTornTailIsCutAndReportedAtEveryLength(t *testing.T) {
	fs, rec, want := smallLog(t, 30, false)
	last := rec.Segments[len(rec.Segments)-1]
	all := locationsOf(t, fs, rec)
	var buffer [SegmentBytesMin]byte
	readAt(t, fs, last.File, 0, buffer[:])
	for _, p := range all {
		if p.file != last.File {
			continue
		}
		for cut := p.off + 1; cut < p.off+int64(p.space); cut++ {
			torn := vfs.NewMem()
			copyLog(t, fs, torn, rec)
			_ = patch(t, torn, last.File, cut, make([]byte, SegmentBytesMin-cut)) // what was not written reads as zero
			got, bodies := mustReplay(t, torn, 0)
			whole := cut >= p.off+int64(p.space)-8 && bytes.Equal(buffer[cut:p.off+int64(p.space)], make([]byte, p.off+int64(p.space)-cut))
			if whole { // only padding is missing
				continue
			}
			n := int(p.epoch) - 1
			if got.Last != p.epoch-1 || !slices.EqualFunc(bodies.bodies, want.bodies[:n], bytes.Equal) {
				t.Fatalf("cut at %d in epoch %d: last %d", cut, p.epoch, got.Last)
			}
			if cut-p.off >= 16 && (got.Torn == nil || got.Torn.File != last.File || got.Torn.Offset != p.off || got.Torn.Epoch != p.epoch) {
				t.Fatalf("cut at %d in epoch %d: %+v", cut, p.epoch, got.Torn)
			}
			if cut%50 == 0 {
				a, err := startLog(testOptions2(torn), got)
				if err != nil {
					t.Fatal(err)
				}
				mustClose(t, a.log)
				if size, _ := torn.Size(last.File); got.Torn != nil && size != p.off+closeRecordSpace {
					t.Fatalf("the tail was not truncated and closed: %d bytes", size)
				}
			}
		}
	}
}

func copyLog(t *testing.T, from, to vfs.FS, rec Recovery) {
	t.Helper()
	if err := to.MkdirAll(Dir(testDir)); err != nil {
		t.Fatal(err)
	}
	for _, s := range rec.Segments {
		b := make([]byte, s.Bytes)
		readAt(t, from, s.File, 0, b)
		f, err := to.Open(s.File, vfs.Create)
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
}

func TestBadRecordThatWasNeverDurableIsATornTail(t *testing.T) {
	fs := vfs.NewMem()
	a := mustStart(t, testOptions(fs, 64<<10))
	for i := range 10 {
		a.mustAppend(t, bodyOf(uint64(i), 100)) // one group: no record proves that another is durable
	}
	if err := a.log.Flush(10); err != nil {
		t.Fatal(err)
	}
	fs = fs.Crash(1, vfs.SurviveAll)
	rec, _ := mustReplay(t, fs, 0)
	all := locationsOf(t, fs, rec)
	_ = patch(t, fs, all[4].file, all[4].off+30, []byte("damage"))
	rec, _ = mustReplay(t, fs, 0)
	end := all[9].off + int64(all[9].space)
	if rec.Last != 4 || rec.Torn == nil || rec.Torn.Offset != all[4].off || rec.Torn.Bytes != end-all[4].off || rec.Torn.Epoch != 5 {
		t.Fatalf("last %d, torn %+v", rec.Last, rec.Torn)
	}
}

func TestNewerVersionIsNeitherTornNorCorrupt(t *testing.T) {
	fs, rec, _ := smallLog(t, 30, false)
	file := rec.Segments[0].File
	var page [headerSize]byte
	readAt(t, fs, file, 0, page[:])
	binary.LittleEndian.PutUint32(page[8:], version2+1)
	binary.LittleEndian.PutUint32(page[headerSumOffset:], crc32.Checksum(page[:headerSumOffset], castagnoli))
	undo := patch(t, fs, file, 0, page[:])
	_, _, err := replayAll(fs, 0)
	var v *VersionError
	if !errors.As(err, &v) || errors.Is(err, ErrCorrupt) || v.File != file {
		t.Fatal(err)
	}
	if _, err := Repair(fs, testDir, 0, Proof{}); !errors.Is(err, ErrVersion) {
		t.Fatalf("repair of a newer version: %v", err)
	}
	undo()

	p := locationsOf(t, fs, rec)[3]
	b := make([]byte, p.space)
	readAt(t, fs, p.file, p.off, b)
	length := binary.LittleEndian.Uint32(b[4:])
	sealRecord(b, seedOf(rec.Segments[0].identity), length, p.epoch, 0x80, p.durable)
	_ = patch(t, fs, p.file, p.off, b)
	if _, _, err := replayAll(fs, 0); !errors.As(err, &v) || v.Offset != p.off {
		t.Fatalf("unknown record flag: %v", err)
	}
}

// TestReadErrorIsNotTheEndOfTheLog: only what the device cannot read is damage, and only where a record may be.
func TestReadErrorIsNotTheEndOfTheLog(t *testing.T) {
	fs, _, want := smallLog(t, 30, false)
	for _, errno := range vfs.Errnos() {
		for nth := 1; ; nth++ {
			faulty := vfs.NewFaulty(fs)
			rule := faulty.Inject(vfs.Rule{Op: vfs.OpRead, Nth: nth, Sticky: true, Err: errno})
			_, got, err := replayAll(faulty, 0)
			if rule.Fired() == 0 {
				if nth < 4 {
					t.Fatal("too few reads")
				}
				break
			}
			if err == nil && errno == syscall.EIO && slices.EqualFunc(got.bodies, want.bodies, bytes.Equal) {
				continue // it was only looked for a proof that the end is damaged
			}
			if err == nil || errors.Is(err, ErrCorrupt) != (errno == syscall.EIO) {
				t.Fatalf("read %d, %v: %v", nth, errno, err)
			}
		}
	}
}

func TestErrorOfTheCallbackEndsTheReplay(t *testing.T) {
	fs, _, _ := smallLog(t, 30, false)
	stop := errors.New("stop")
	if _, err := Replay(fs, testDir, 0, Proof{}, func(e keys.Epoch, _ []byte) error {
		if e == 7 {
			return stop
		}
		return nil
	}); !errors.Is(err, stop) {
		t.Fatal(err)
	}
}

// TestARepairKeepsWhatIsOnTheDevice: after a failed sync the newest records are in the kernel's memory only. A repair that keeps them, because
// the damage is after them, makes them durable: with the records that follow they would be lost in a crash otherwise.
func TestARepairKeepsWhatIsOnTheDevice(t *testing.T) {
	mem := vfs.NewMem()
	faulty := vfs.NewFaulty(mem)
	a := mustStart(t, testOptions(faulty, SegmentBytesMin))
	if _, err := a.put(bodyOf(1, 100)); err != nil {
		t.Fatal(err)
	}
	waitForPreallocated(t, a.log)
	rule := faulty.Inject(vfs.Rule{Op: vfs.OpSyncData, Name: FileName(1), Fault: vfs.DiscardDirty})
	if _, err := a.put(bodyOf(2, 100)); err == nil || rule.Fired() != 1 {
		t.Fatal(err)
	}
	mem = mem.Crash(1, vfs.SurviveProcess)
	_ = a.log.Close()
	_ = patch(t, mem, path.Join(Dir(testDir), FileName(2)), 0, []byte("damage"))
	if d, err := Repair(mem, testDir, 0, Proof{}); err != nil || d.Cause == nil || d.From != 3 {
		t.Fatalf("%+v, %v", d, err)
	}
	rec, err := Recover(mem, testDir, 0, Proof{}, func(Commit) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	if a, err = startLog(testOptions2(mem), rec); err != nil {
		t.Fatal(err)
	}
	e, err := a.put(bodyOf(3, 100))
	if err != nil {
		t.Fatal(err)
	}
	left := mem.Crash(1, vfs.SurviveNone)
	_ = a.log.Close()
	if rec, err := Recover(left, testDir, 0, Proof{}, func(Commit) error { return nil }); err != nil || rec.Last != e {
		t.Fatalf("last %d, want %d: %v", rec.Last, e, err)
	}
}

// TestCrashInRepairLeavesItToBeRepeated: after a crash at any operation of a repair the log is either repaired or corrupt
// as before, and another repair ends as the first one would have.
func TestCrashInRepairLeavesItToBeRepeated(t *testing.T) {
	for _, header := range []bool{false, true} {
		for k := int64(1); ; k++ {
			fs, rec, want := smallLog(t, 120, false)
			if len(rec.Segments) < 4 {
				t.Fatal(len(rec.Segments))
			}
			second := rec.Segments[1]
			var given keys.Epoch
			for range 2 { // each run skips what a crash before it may have cut, so that epochs are far beyond the records that are left
				later := mustStart(t, testOptions(fs, SegmentBytesMin))
				for i := range uint64(60) {
					e, err := later.put(bodyOf(1000+i, 150))
					if err != nil {
						t.Fatal(err)
					}
					given = e
				}
				fs = fs.Crash(1, vfs.SurviveAll)
			}
			kept, name, off := 0, second.File, int64(headerPage+200)
			if header {
				off = 20
			}
			_ = patch(t, fs, name, off, []byte{0xa5, 0x5a, 0xa5, 0x5a})
			if d, err := Repair(fs.Crash(1, vfs.SurviveAll), testDir, 0, Proof{}); err != nil || d.Cause == nil {
				t.Fatal(d, err)
			} else {
				kept = int(d.From) - 1
			}
			fs = fs.Crash(1, vfs.SurviveAll)
			fs.CrashAt(fs.Mutations() + k)
			_, err := Repair(fs, testDir, 0, Proof{})
			done := !fs.Crashed()
			if done && err != nil {
				t.Fatal(err)
			}
			for seed, keep := range []vfs.Survival{vfs.SurviveNone, vfs.SurviveSome, vfs.SurviveSome, vfs.SurviveAll} {
				left := fs.Crash(uint64(seed)+uint64(k), keep)
				if _, err := Repair(left, testDir, 0, Proof{}); err != nil {
					t.Fatalf("header %v, operation %d: a second repair: %v", header, k, err)
				}
				again, got := mustReplay(t, left, 0)
				if again.Torn != nil || !slices.EqualFunc(got.bodies, want.bodies[:kept], bytes.Equal) {
					t.Fatalf("header %v, operation %d: %d records, want %d", header, k, len(got.bodies), kept)
				}
				if again.Next() <= given {
					t.Fatalf("header %v, operation %d: continues at %d, and %d was given out", header, k, again.Next(), given)
				}
			}
			if done {
				break
			}
		}
	}
}
