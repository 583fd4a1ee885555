package storage

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
	"github.com/epochkv/epochkv/internal/wal"
)

// TestLogIsKeptUntilTheSuperblockIsCertain: the sync of a superblock fails, and a new process, on a full disk, reads that
// superblock from the page cache. It needs space for a segment, and removes none that the superblock before needs,
// which a power cut brings back.
func TestLogIsKeptUntilTheSuperblockIsCertain(t *testing.T) {
	q := newQuarantineBench(t, vfs.NewMem())
	q.options.disturb = nil
	faulty := vfs.NewFaulty(q.fs)
	q.options.FS = faulty
	q.mustOpen()
	for i := range 300 {
		q.set(fmt.Sprintf("key-%05d", i), strings.Repeat("v", 900))
	}
	if err := q.engine.WaitDurable(t.Context(), keys.Epoch(q.visible.Load())); err != nil {
		t.Fatal(err)
	}
	rule := faulty.Inject(vfs.Rule{Op: vfs.OpSyncData, Name: dataName, Nth: 2, Fault: vfs.DiscardDirty})
	if err := q.checkpointAt(); err == nil || rule.Fired() != 1 {
		t.Fatalf("the sync did not fail: %v", err)
	}
	_ = q.engine.Close()
	q.removeUnusedSegments()
	q.fs.SetCapacity(1)
	q.mustOpen() // a new process
	left := q.fs
	for seed := range uint64(8) {
		disk := left.Crash(seed, vfs.SurviveAll)
		if seed == 0 {
			_ = q.engine.Close() // its files are gone
		}
		disk.SetCapacity(0)
		q.fs, q.options.FS = disk, disk
		q.mustOpen()
		q.checkNow()
		q.mustClose()
	}
}

// TestChangeLogIsKeptUntilTheSuperblockIsCertain: the same, but the file system has no space to write the superblock again. What is kept
// of the log for readers that come back is not given up either, neither when its time is over nor because the disk is full.
func TestChangeLogIsKeptUntilTheSuperblockIsCertain(t *testing.T) {
	q := newQuarantineBench(t, vfs.NewMem())
	q.options.disturb = nil
	q.options.DiskReserve = DiskReserveDerived
	q.options.ChangeLog = ChangeLog{Age: time.Nanosecond}
	faulty := vfs.NewFaulty(q.fs)
	q.options.FS = faulty
	q.mustOpen()
	for i := range 300 {
		q.set(fmt.Sprintf("key-%05d", i), strings.Repeat("v", 900))
	}
	if err := q.engine.WaitDurable(t.Context(), keys.Epoch(q.visible.Load())); err != nil {
		t.Fatal(err)
	}
	faulty.Inject(vfs.Rule{Op: vfs.OpSyncData, Name: dataName, Nth: 2, Fault: vfs.DiscardDirty})
	if err := q.checkpointAt(); err == nil {
		t.Fatal("the sync did not fail")
	}
	_ = q.engine.Close()
	q.fs = q.fs.Crash(0, vfs.SurviveProcess)
	faulty = vfs.NewFaulty(q.fs)
	q.options.FS = faulty
	rule := faulty.Inject(vfs.Rule{Op: vfs.OpWrite | vfs.OpPreallocate, Name: dataName, Sticky: true, Err: syscall.ENOSPC})
	q.mustOpen()
	blocked := vfs.ErrNoSpace
	q.engine.checkpoints.blocked.Store(&blocked)
	q.engine.CheckSpace()
	if err := q.engine.TruncateLog(); err != nil || rule.Fired() == 0 || q.engine.Shortage() == nil {
		t.Fatal(err)
	}
	disk := q.fs.Crash(1, vfs.SurviveAll) // but not what the failed sync has discarded
	_ = q.engine.Close()                  // its files are gone
	q.fs, q.options.FS = disk, disk
	q.mustOpen()
	q.checkNow()
	q.mustClose()
}

// removeUnusedSegments removes what the log has allocated in advance.
func (q *quarantineBench) removeUnusedSegments() {
	q.t.Helper()
	used, err := wal.Segments(q.fs, "db")
	if err != nil {
		q.t.Fatal(err)
	}
	names, err := q.fs.List(wal.Dir("db"))
	for _, name := range names {
		file := path.Join(wal.Dir("db"), name)
		if !slices.ContainsFunc(used, func(s wal.SegmentInfo) bool { return s.File == file }) {
			err = errors.Join(err, q.fs.Remove(file))
		}
	}
	if err != nil {
		q.t.Fatal(err)
	}
}
