package wal

import (
	"errors"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestARepairDropsNothingThatTheDataFileHas: a record that the data file has is damaged, and a repair, which a crash interrupts at each of its
// operations, drops what comes after the epoch of the data file only. A reader of the log is not told that the epochs from
// the damage to there name no commit: it fails there.
func TestARepairDropsNothingThatTheDataFileHas(t *testing.T) {
	const damaged, last = 6, 12
	for _, log := range []string{"without a lineage", "with a lineage", "of one file"} {
		for _, after := range []keys.Epoch{damaged - 1, damaged, 9, last} {
			opts := testOptions2(vfs.NewMem())
			if opts.SegmentBytes = 64 << 10; log != "without a lineage" {
				opts.Lineage = testLineage
			}
			whole := craftedLog(t, craft(1, 1, 0, 0).plain("abcdefghijkl"))
			if log != "of one file" { // else the number of the new file is the next one, and none can be missing between them
				mustStart(t, opts).mustRun(t, last)
				whole = opts.FS.(*vfs.Mem).Crash(1, vfs.SurviveAll)
			}
			rec, _ := mustReplay(t, whole, 0)
			bad := locationsOf(t, whole, rec)[damaged-1]
			_ = patch(t, whole, bad.file, bad.off+recordHeaderSize, []byte{0xa5, 0x5a})
			proof := Proof{Lineage: opts.Lineage}
			for crash, interrupted := int64(1), true; interrupted; crash++ {
				mem := whole.Crash(1, vfs.SurviveProcess)
				mem.CrashAt(mem.Mutations() + crash)
				dropped, err := Repair(mem, testDir, after, proof)
				if interrupted = mem.Crashed(); interrupted {
					mem = mem.Crash(1, vfs.SurviveAll)
				} else if err != nil || dropped.From != after+1 || dropped.Cause == nil || dropped.Cause.Epoch != damaged {
					t.Fatalf("the data file is at epoch %d: %+v, %v", after, dropped, err)
				}
				mem.CrashAt(0)
				if again, err := Repair(mem, testDir, after, proof); err != nil || again.Cause != nil && (!interrupted || again.From != after+1) {
					t.Fatalf("the second repair of a log "+log+", after a crash at operation %d: %+v, %v", crash, again, err)
				}
				opts.FS = mem
				readsAround(t, opts, damaged, after, last)
			}
		}
	}
}

// readsAround opens a repaired log, and reads the epochs before the damage, those that the data file has, and those that the repair has dropped.
func readsAround(t *testing.T, opts Options, damaged, after, last keys.Epoch) {
	t.Helper()
	passed := keys.Epoch(0)
	rec, err := Recover(opts.FS, testDir, after, Proof{Lineage: opts.Lineage}, func(c Commit) error {
		passed = c.Skipped
		return nil
	})
	if err != nil || passed != after+1 || len(rec.Skipped) != 1 || rec.Skipped[0].First != after+1 || rec.Next() <= last {
		t.Fatalf("after epoch %d: skipped %v, next %d, passed on %d, %v", after, rec.Skipped, rec.Next(), passed, err)
	}
	a, err := startLog(opts, rec)
	if err != nil {
		t.Fatal(err)
	}
	defer mustClose(t, a.log)
	end, err := a.put(bodyOf(1, 100))
	if err != nil || end <= last {
		t.Fatalf("epoch %d, %v", end, err)
	}
	for e := keys.Epoch(1); e <= last; e++ {
		r := a.log.ReadFrom(e, TailMark{})
		got, ok, err := r.Next(end)
		_ = r.Close()
		_, truncated := errors.AsType[*TruncatedError](err)
		var want bool
		switch {
		case e < damaged:
			want = ok && !got.Gap && got.Epoch == e
		case e <= after:
			kept := e > damaged && ok && !got.Gap && got.Epoch == e // if nothing was cut, because the repair was interrupted
			want = kept || !ok && (truncated || errors.Is(err, ErrCorrupt))
		default:
			want = ok && got.Skipped && got.First == after+1
		}
		if !want {
			t.Fatalf("the data file is at epoch %d: the log has at epoch %d %+v, %v, %v", after, e, got, ok, err)
		}
	}
}

// TestARepairKnowsTheTermOfTheDataFile: the term of its epoch began in the part of the log that cannot be read.
func TestARepairKnowsTheTermOfTheDataFile(t *testing.T) {
	log := craft(1, 1, 1, 1).plain("abc")
	damaged := log.at
	log.plain("d").terms(3, 1).plain("efgh")
	log.buffer[damaged+recordHeaderSize] ^= 1
	proof := Proof{Lineage: testLineage, Term: 3}
	for _, after := range []keys.Epoch{6, 8} {
		fs := craftedLog(t, log)
		dropped, err := Repair(fs, testDir, after, proof)
		if err != nil || dropped.From != after+1 {
			t.Fatalf("%+v, %v", dropped, err)
		}
		if got, rec, err := letters(fs, after, proof); err != nil || got != "" || rec.Term() != 3 {
			t.Errorf("after epoch %d: %q, term %d, %v", after, got, rec.Term(), err)
		}
	}
}

// TestPartsOfDroppedCommitsOnly: the data file has parts of commits after its epoch. They are named as far as they are dropped.
func TestPartsOfDroppedCommitsOnly(t *testing.T) {
	for durable, parts := range map[keys.Epoch]keys.Epoch{4: 0, 6: 0, 7: 7, 8: 8} {
		log := craft(1, 1, 1, 1).plain("abcdefgh")
		log.buffer[headerPage+3*32+recordHeaderSize] ^= 1 // epoch 4
		fs := craftedLog(t, log)
		if dropped, err := Repair(fs, testDir, 6, Proof{Lineage: testLineage, Term: 1, Durable: durable}); err != nil || dropped.From != 7 || dropped.Parts != parts {
			t.Errorf("durable up to epoch %d: %+v, %v", durable, dropped, err)
		}
	}
}
