package storage

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pagesource"
	"github.com/epochkv/epochkv/internal/vfs"
)

// checkpointInSteps merges everything in steps of few keys, as on a full disk, and returns how many there were.
func (q *quarantineBench) checkpointInSteps(snapshots ...keys.Epoch) (steps uint64, err error) {
	q.t.Helper()
	e, ctx := q.engine, context.Background()
	at := keys.Epoch(q.visible.Load())
	if err := e.Rotate(ctx); err != nil {
		return 0, err
	}
	if err := e.checkpoints.mu.Lock(ctx); err != nil {
		return 0, err
	}
	defer e.checkpoints.mu.Unlock()
	before := e.pager.Checkpoint()
	h := GCWatermarks{Visible: at, Snapshots: append(snapshots, at)}
	job := mergeJob{immutables: e.complete(at), watermarks: h}
	if len(job.immutables) == 0 {
		return 0, nil
	}
	s := stepper{engine: e, job: job, cut: job.cut(0), halved: 20}
	err = s.run(ctx)
	return e.pager.Checkpoint() - before, err
}

func (q *quarantineBench) mustCheckpointInSteps(snapshots ...keys.Epoch) {
	q.t.Helper()
	steps, err := q.checkpointInSteps(snapshots...)
	if err != nil || steps < 5 {
		q.t.Fatalf("%d steps: %v", steps, err)
	}
}

func (q *quarantineBench) checkNow() {
	q.t.Helper()
	q.check(keys.Epoch(q.visible.Load()), q.want)
}

// checkGetsNow reads everything without scans, which do not pass a page that cannot be read.
func (q *quarantineBench) checkGetsNow() {
	q.t.Helper()
	q.slot.Enter()
	defer q.slot.Leave()
	q.checkGets(q.engine.NewReader(), keys.Epoch(q.visible.Load()), q.want)
}

// TestStepsKeepQuarantinedKeys: what a step puts into quarantine, or finds there, is there after the steps for other keys, whether the versions
// come from the memtables at hand or from an earlier checkpoint, and whether a snapshot sees the older ones or not.
func TestStepsKeepQuarantinedKeys(t *testing.T) {
	q := newQuarantineBench(t, vfs.NewMem())
	q.mustOpen()
	q.fill()
	q.mustCheckpointInSteps()
	q.checkNow()
	first, atFirst := maps.Clone(q.want), keys.Epoch(q.visible.Load())
	for round := range 3 {
		for i := range 100 {
			q.set(fmt.Sprintf("key-%05d", i), fmt.Sprint("round ", round))
		}
		for _, key := range refused()[:2] {
			q.set(key, fmt.Sprint("long in round ", round))
		}
		q.mustCheckpointInSteps(atFirst)
		q.checkNow()
		q.check(atFirst, first)
	}
	q.set(refused()[0], "")
	q.set(orderKey, "")
	for i := range 20 {
		q.set(fmt.Sprintf("key-%05d", i), "")
	}
	q.mustCheckpointInSteps()
	q.checkNow()
	q.mustClose()
	q.mustOpen()
	q.checkNow()
	q.checkOffline(true)
}

// TestCrashBetweenStepsKeepsQuarantinedKeysAndBlobs crashes at each operation of a merge in steps whose versions go to the tree, to blobs and into
// quarantine. The restart reads everything and merges the same versions again.
func TestCrashBetweenStepsKeepsQuarantinedKeysAndBlobs(t *testing.T) {
	q := newQuarantineBench(t, vfs.NewMem())
	q.mustOpen()
	q.fill()
	if err := q.checkpointAt(); err != nil {
		t.Fatal(err)
	}
	q.overwrite(refused())
	if err := q.engine.WaitDurable(t.Context(), keys.Epoch(q.visible.Load())); err != nil {
		t.Fatal(err)
	}
	disk := q.fs.Crash(1, vfs.SurviveAll)
	_ = q.engine.Close() // its files are gone
	q.crashAnywhere(disk, q.checkNow, func() { q.checkOffline(true) })
}

// overwrite puts new values, every third one a blob, and deletes some keys; some stay as they are.
func (q *quarantineBench) overwrite(also []string) {
	q.t.Helper()
	for i := range 100 {
		switch key := fmt.Sprintf("key-%05d", i); {
		case i%3 == 0:
			q.set(key, strings.Repeat(fmt.Sprint(i, " "), 300))
		case i%7 == 1:
			q.set(key, "")
		case i%7 != 2:
			q.set(key, "new")
		}
	}
	for _, key := range also {
		q.set(key, "new, too")
	}
}

// crashAnywhere merges what the log on disk has in steps, and crashes at every few operations. After each crash it checks the store, before and after
// it merges once more.
func (q *quarantineBench) crashAnywhere(disk *vfs.Mem, check, checkAndClose func()) {
	q.t.Helper()
	for kill, done := int64(1), false; !done; kill += 17 {
		q.fs = disk.Crash(uint64(kill), vfs.SurviveAll)
		q.options.FS = q.fs
		q.fs.CrashAt(q.fs.Mutations() + kill)
		err := q.open()
		if err == nil {
			_, err = q.checkpointInSteps()
			err = errors.Join(err, q.engine.Close())
		}
		if done = !q.fs.Crashed(); done && err != nil {
			q.t.Fatalf("operation %d: %v", kill, err)
		}
		q.fs = q.fs.Crash(uint64(kill), []vfs.Survival{vfs.SurviveAll, vfs.SurviveNone, vfs.SurviveSome}[kill%3])
		q.options.FS = q.fs
		q.mustOpen()
		check()
		if _, err := q.checkpointInSteps(); err != nil {
			q.t.Fatal(err)
		}
		check()
		checkAndClose()
	}
}

// loseLeaf destroys the leaf of the tree that has a key, on the disk of a closed store.
func (q *quarantineBench) loseLeaf(key string) {
	q.t.Helper()
	state, err := Files{q.fs, "db"}.OpenState()
	if err != nil {
		q.t.Fatal(err)
	}
	root, target := state.Tree(), keys.Append(nil, keys.SpaceUser, []byte(key))
	id := root.ID
	for level := root.Level; level > 0; level-- {
		p, err := pagesource.NewDirect(&state.Pages.Reader).Page(id, level)
		if err != nil {
			q.t.Fatal(err)
		}
		id = page.Inner(p).Child(page.Inner(p).Search(target, page.NoTrailer))
	}
	f, err := q.fs.Open(state.Files.DataPath(), vfs.ReadWrite)
	if err != nil {
		q.t.Fatal(err)
	}
	_, err = f.WriteAt(make([]byte, 512), int64(id)*512)
	if err := errors.Join(err, f.Sync(), f.Close(), state.Close()); err != nil {
		q.t.Fatal(err)
	}
}

// TestCrashBetweenStepsKeepsTheRepairTree does the same while a leaf is damaged: the versions of its keys, blobs among them, go into the repair tree and its
// mirror step by step.
func TestCrashBetweenStepsKeepsTheRepairTree(t *testing.T) {
	q := newQuarantineBench(t, vfs.NewMem())
	q.options.disturb = nil
	q.mustOpen()
	for i := range 100 {
		q.set(fmt.Sprintf("key-%05d", i), strings.Repeat("plain ", 1+i%4*40))
	}
	if err := q.checkpointAt(); err != nil {
		t.Fatal(err)
	}
	q.mustClose()
	q.loseLeaf("key-00041")
	q.mustOpen()
	for i := range 100 { // what the leaf has had is lost
		q.set(fmt.Sprintf("key-%05d", i), fmt.Sprint("again ", i))
	}
	q.overwrite(nil)
	for i := 30; i < 50; i++ {
		q.set(fmt.Sprintf("key-%05d", i), strings.Repeat("blob ", 10+i%2*300))
	}
	q.set("key-00041", "")
	if err := q.engine.WaitDurable(t.Context(), keys.Epoch(q.visible.Load())); err != nil {
		t.Fatal(err)
	}
	disk := q.fs.Crash(1, vfs.SurviveAll)
	_ = q.engine.Close() // its files are gone
	q.crashAnywhere(disk, q.checkGetsNow, q.mustClose)

	q.fs = disk.Crash(1, vfs.SurviveAll)
	q.options.FS = q.fs
	q.mustOpen()
	q.mustCheckpointInSteps()
	if q.engine.Damage() == nil {
		t.Fatal("no page is skipped: the test tests nothing")
	}
	q.checkGetsNow()
	q.mustClose()
	report, err := Inspect.Files(t.Context(), q.fs, "db")
	if err != nil || len(report.Kinds) != 1 || report.Kinds[0] != "page" {
		t.Fatalf("%v, %+v", err, report)
	}
}

// TestChangeOfALaterEpochIsNoEarlierOneBetweenSteps: between two steps the tree has versions of epochs after its own. Of
// such a version ChangedSince does not say that it is a change before a snapshot that does not see it.
func TestChangeOfALaterEpochIsNoEarlierOneBetweenSteps(t *testing.T) {
	q := newQuarantineBench(t, vfs.NewMem())
	q.mustOpen()
	defer q.mustClose()
	for i := range 100 {
		q.set(fmt.Sprintf("%03d", i), "old")
	}
	since := keys.Epoch(q.visible.Load())
	if err := q.checkpointAt(); err != nil {
		t.Fatal(err)
	}
	q.set("999", "other")
	if err := q.checkpointAt(since); err != nil {
		t.Fatal(err)
	}
	at := keys.Epoch(q.visible.Load())
	for i := range 100 {
		q.set(fmt.Sprintf("%03d", i), "new")
	}
	e, ctx := q.engine, t.Context()
	if err := e.Rotate(ctx); err != nil {
		t.Fatal(err)
	}
	if err := e.checkpoints.mu.Lock(ctx); err != nil {
		t.Fatal(err)
	}
	visible := keys.Epoch(q.visible.Load())
	job := mergeJob{immutables: e.complete(visible), watermarks: GCWatermarks{Visible: visible, Snapshots: []keys.Epoch{since, at, visible}}}
	s := stepper{engine: e, job: job, cut: job.cut(0)}
	err := s.engine.log.WaitDurable(ctx, s.cut)
	if err == nil {
		err = s.step(ctx, &keySpan{upper: keys.Append(nil, keys.SpaceUser, []byte("050"))})
	}
	e.checkpoints.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	q.slot.Enter()
	defer q.slot.Leave()
	lower, upper := keys.Append(nil, keys.SpaceUser, []byte("000")), keys.Append(nil, keys.SpaceUser, []byte("100"))
	if epoch, changed, err := e.NewReader().ChangedSince(e.Pin(), lower, upper, since, at+1); err != nil || changed && epoch <= at {
		t.Errorf("changed %v at epoch %d, %v; the changes are after %d", changed, epoch, err, at)
	}
}
