package storage

import (
	"fmt"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// fillOthers lets other programs take the whole disk before each operation on a quarantine file.
func (q *quarantineBench) fillOthers() {
	q.fs.SetHook(func(_ vfs.Op, name string) {
		if strings.Contains(name, "quarantine") {
			q.fs.LeaveFree(0)
		}
	})
}

// TestDeletionsAreMergedThoughTheQuarantineIsWrittenOnAFullDisk: other programs take the disk when the store has
// started, and again after each checkpoint. Deletions of quarantined keys and of others are merged, free space,
// and survive a restart; so is an entry that joins the quarantine.
func TestDeletionsAreMergedThoughTheQuarantineIsWrittenOnAFullDisk(t *testing.T) {
	for _, started := range []bool{false, true} {
		t.Run(fmt.Sprintf("restart=%v", started), func(t *testing.T) {
			q := newQuarantineBench(t, vfs.NewMem())
			q.options.DiskReserve = DiskReserveDerived
			q.mustOpen()
			q.fill()
			for i := range 300 {
				q.set(fmt.Sprintf("more-%05d", i), strings.Repeat("v", 900))
			}
			if err := q.checkpointAt(); err != nil {
				t.Fatal(err)
			}
			if started {
				q.mustClose()
				q.mustOpen()
			}
			live := q.engine.Stats().Pages.Live
			checkpoint := func(what string) {
				t.Helper()
				q.fillOthers()
				if err := q.checkpointAt(); err != nil {
					t.Fatalf("%s: %v", what, err)
				}
				q.checkNow()
			}
			for i := range 100 {
				q.set(fmt.Sprintf("more-%05d", i), "")
			}
			checkpoint("deletions of other keys")
			for round := range 4 {
				q.set(refused()[0], fmt.Sprint("overwritten ", round))
				checkpoint("a quarantined key is overwritten")
			}
			q.set("joins"+strings.Repeat("x", 200), "new")
			checkpoint("an entry joins")
			for _, key := range refused() {
				q.set(key, "")
				checkpoint("a quarantined key is deleted")
			}
			for i := range 200 {
				q.set(fmt.Sprintf("more-%05d", i), "")
			}
			checkpoint("more deletions")
			if now := q.engine.Stats().Pages.Live; now > live-300 {
				t.Fatalf("%d live pages, and %d before the deletions", now, live)
			}
			q.mustClose()
			q.mustOpen()
			q.checkNow()
			q.checkOffline(true)
		})
	}
}

// TestQuarantineOfTheOlderSuperblockIsKeptUntilTheNewerOneIsCertain: the sync of a superblock fails, and a new process
// reads that superblock from the page cache. Until it is durable for certain, the file of the superblock before it is not
// changed: a power cut brings that one back.
func TestQuarantineOfTheOlderSuperblockIsKeptUntilTheNewerOneIsCertain(t *testing.T) {
	for nth := 1; nth <= 2; nth++ { // the pages, the superblock
		q := newQuarantineBench(t, vfs.NewMem())
		q.options.DiskReserve = DiskReserveDerived
		faulty := vfs.NewFaulty(q.fs)
		q.options.FS = faulty
		q.mustOpen()
		q.fill()
		if err := q.checkpointAt(); err != nil {
			t.Fatal(err)
		}
		q.set(refused()[0], strings.Repeat("so large that the reserve grows ", 1200))
		if err := q.engine.WaitDurable(t.Context(), keys.Epoch(q.visible.Load())); err != nil {
			t.Fatal(err)
		}
		rule := faulty.Inject(vfs.Rule{Op: vfs.OpSyncData, Name: dataName, Nth: nth, Fault: vfs.DiscardDirty})
		if err := q.checkpointAt(); err == nil || rule.Fired() != 1 {
			t.Fatalf("the sync did not fail: %v", err)
		}
		_ = q.engine.Close()
		q.mustOpen() // a new process
		q.engine.CheckSpace()
		q.checkNow()
		disk := q.fs.Crash(1, vfs.SurviveNone)
		_ = q.engine.Close() // its files are gone
		q.fs, q.options.FS = disk, disk
		q.mustOpen()
		q.checkNow()
		q.mustClose()
	}
}
