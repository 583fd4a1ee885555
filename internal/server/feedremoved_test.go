package server

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/storage/inspect"
	"github.com/epochkv/epochkv/internal/vfs"
)

// damageLog changes a byte of the log, after the records that are in the tree and before the last ones, and repairs the log.
func damageLog(t *testing.T, disk *vfs.Mem, dir string) inspect.RepairedLog {
	t.Helper()
	names, err := disk.List(dir + "/wal")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		for at := int64(10_000); at < 1<<20 && strings.HasSuffix(name, ".log"); at += 15_000 {
			flipInLog(t, disk, dir+"/wal/"+name, at)
			dropped, err := inspect.RepairLog(disk, dir)
			if err == nil && dropped.Cause != nil {
				return dropped
			}
			flipInLog(t, disk, dir+"/wal/"+name, at)
		}
	}
	t.Fatalf("nothing in %q is needed", names)
	return inspect.RepairedLog{}
}

// flipInLog changes a byte of a file, or changes it back.
func flipInLog(t *testing.T, disk *vfs.Mem, name string, at int64) {
	t.Helper()
	f, err := disk.Open(name, vfs.ReadWrite)
	if err != nil {
		t.Fatal(err)
	}
	var b [1]byte
	if _, err := f.ReadAt(b[:], at); err == nil {
		b[0] ^= 1
		_, err = f.WriteAt(b[:], at)
		if err = errors.Join(err, f.Sync()); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestTokensOfRemovedCommitsAreRefusedForEver: repair-log removes commits of which a watch has told its client. No difference
// undoes them, also when the log does not have the record of the repair any more.
func TestTokensOfRemovedCommitsAreRefusedForEver(t *testing.T) {
	before := mustStart(t, retaining)
	var token []byte
	w := mustWatch(t, before, &pb.CreateWatch{Start: &pb.CreateWatch_AfterEpoch{}})
	for i := range 300 {
		before.put(t, fmt.Sprint("k", i), strings.Repeat("v", 5000))
	}
	_, token = w.events(300)
	first := before.get(t, "k0").Epoch
	disk := before.disk.Crash(1, vfs.SurviveAll)
	dir := before.config.DataDir
	dropped := damageLog(t, disk, dir)
	for round := range 3 {
		h := mustStartOn(t, disk, func(c *config.Config) { c.Feed.Retention, c.Retention = 0, time.Hour })
		for _, gap := range []pb.OnGap{pb.OnGap_ON_GAP_FAIL, pb.OnGap_ON_GAP_DIFF} {
			w := mustWatch(t, h, &pb.CreateWatch{OnGap: gap, Start: &pb.CreateWatch_ResumeToken{ResumeToken: token}})
			if f := failureOf(t, w.ended()); f.reason != pb.ErrorReason_ERROR_REASON_HISTORY_GONE.Reason() {
				t.Errorf("start %d, %v: %+v", round, gap, f)
			}
		}
		if round == 0 && first < uint64(dropped.From) {
			kept := mustWatch(t, h, &pb.CreateWatch{Start: &pb.CreateWatch_AfterEpoch{AfterEpoch: first}})
			if kept.recv().GetCreated() == nil {
				t.Error("a position before the removed commits is refused")
			}
		}
		for h.Server.feed.feed.Oldest() <= dropped.From+1<<24 {
			h.put(t, "more", strings.Repeat("v", 100_000))
			if _, err := h.admin.Checkpoint(testContext(t), new(pb.CheckpointRequest)); err != nil {
				t.Fatal(err)
			}
		}
		if err := h.stop(); err != nil {
			t.Fatal(err)
		}
	}
}
