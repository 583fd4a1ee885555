package storage

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/metadata"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/vfs"
	"github.com/epochkv/epochkv/internal/wal"
)

// pair commits two keys with one value.
func (q *quarantineBench) pair(value string) {
	q.t.Helper()
	var w batch.Builder
	for _, key := range []string{"a", "z"} {
		w.Set(keys.SpaceUser, []byte(key), []byte(value))
		q.want[key] = value
	}
	q.commit(&w)
}

// interruptSteps commits pairs, merges the first key of all of them in a step, and cuts the power.
func (q *quarantineBench) interruptSteps() {
	q.t.Helper()
	for i := range 20 {
		q.pair(fmt.Sprint("value ", i))
	}
	q.interruptMerge()
}

// interruptMerge merges the first key in memory in a step, and cuts the power.
func (q *quarantineBench) interruptMerge() {
	q.t.Helper()
	e, ctx := q.engine, context.Background()
	at := keys.Epoch(q.visible.Load())
	if err := errors.Join(e.Rotate(ctx), e.checkpoints.mu.Lock(ctx), e.WaitDurable(ctx, at)); err != nil {
		q.t.Fatal(err)
	}
	job := mergeJob{immutables: e.complete(at), watermarks: GCWatermarks{Visible: at, Snapshots: []keys.Epoch{at}}}
	s := stepper{engine: e, job: job, cut: job.cut(0), halved: 20}
	span, _ := s.next(nil)
	if err := s.step(ctx, span); err != nil || span.upper == nil {
		q.t.Fatalf("step to %q: %v", span.upper, err)
	}
	e.checkpoints.mu.Unlock()
	disk := q.fs.Crash(1, vfs.SurviveAll)
	_ = q.engine.Close() // its files are gone
	q.fs, q.options.FS = disk, disk
}

// loseLastRecord flips a bit in the last record of the log, and returns its epoch.
func (q *quarantineBench) loseLastRecord() (lost keys.Epoch) {
	q.t.Helper()
	segments, err := wal.Segments(q.fs, "db")
	if err != nil {
		q.t.Fatal(err)
	}
	var file string
	var offset int64
	for _, s := range segments {
		err := wal.ReadSegment(q.fs, s, func(r wal.Record) error {
			if r.HoldsEpoch() {
				file, offset, lost = s.File, r.Offset, r.Epoch
			}
			return nil
		})
		if err != nil {
			q.t.Fatal(err)
		}
	}
	f, err := q.fs.Open(file, vfs.ReadWrite)
	if err != nil {
		q.t.Fatal(err)
	}
	var b [1]byte
	_, err = f.ReadAt(b[:], offset+30)
	b[0] ^= 1
	_, writeErr := f.WriteAt(b[:], offset+30)
	if err := errors.Join(err, writeErr, f.Sync(), f.Close()); err != nil {
		q.t.Fatal(err)
	}
	return lost
}

// TestRecordsOfAnInterruptedMergeAreNoTornTail: the tree has parts of commits whose records are the newest of the log. The
// superblock proves that these records were durable: damage of them is not taken for an unfinished record, which
// would leave half of a commit. A repair of the log names the commits of which parts stay.
func TestRecordsOfAnInterruptedMergeAreNoTornTail(t *testing.T) {
	q := newQuarantineBench(t, vfs.NewMem())
	q.options.disturb = nil
	q.mustOpen()
	q.pair("first")
	if err := q.checkpointAt(); err != nil {
		t.Fatal(err)
	}
	q.interruptSteps()
	lost := q.loseLastRecord()
	var damage *CorruptionError
	if err := q.open(); !errors.As(err, &damage) {
		t.Fatalf("a start with half of a commit: %v", err)
	}
	if report, err := Inspect.Files(t.Context(), q.fs, "db"); err != nil || len(report.Kinds) != 1 || report.Kinds[0] != "log" {
		t.Fatalf("verify: %v, %+v", err, report)
	}
	dropped, err := Inspect.Repair(q.fs, "db")
	if err != nil || dropped.From != lost || dropped.Parts != lost {
		t.Fatalf("repair: %v, %+v, lost is %d", err, dropped, lost)
	}
	for range 2 {
		q.mustOpen()
		if next := keys.Epoch(q.visible.Load()); next <= lost {
			t.Fatalf("epochs continue at %d", next)
		}
		q.pair(fmt.Sprint("after ", lost))
		q.checkNow()
		if err := q.checkpointAt(); err != nil {
			t.Fatal(err)
		}
		q.mustClose()
	}
}

// TestInterruptedMergeEndsItsProof: once the merge is complete, or another one that has its commits, the superblock says nothing
// about the log any more.
func TestInterruptedMergeEndsItsProof(t *testing.T) {
	q := newQuarantineBench(t, vfs.NewMem())
	q.options.disturb = nil
	q.mustOpen()
	q.interruptSteps()
	for round := range 3 {
		q.mustOpen()
		q.checkNow()
		state := q.engine.pager.State()
		if newest := logProof(&state).Durable; (newest != 0) != (round == 0) {
			t.Fatalf("round %d: the superblock names epoch %d, and its own is %d", round, newest, state.Epoch)
		}
		q.pair(fmt.Sprint("round ", round))
		if round == 0 {
			if err := q.engine.WaitDurable(t.Context(), keys.Epoch(q.visible.Load())); err != nil {
				t.Fatal(err)
			}
			if steps, err := q.checkpointInSteps(); err != nil || steps < 2 || steps > 3 { // the record of what a crash lost may need one
				t.Fatalf("%d steps: %v", steps, err)
			}
		} else if err := q.checkpointAt(); err != nil {
			t.Fatal(err)
		}
		q.mustClose()
	}
}

// TestAnInterruptedMergeLosesNoRecordOfLostEpochs: a merge in steps after a crash was interrupted before it came to the record of what the crash lost.
func TestAnInterruptedMergeLosesNoRecordOfLostEpochs(t *testing.T) {
	q := newQuarantineBench(t, vfs.NewMem())
	q.options.disturb = nil
	q.mustOpen()
	q.pair("first")
	if err := q.checkpointAt(); err != nil {
		t.Fatal(err)
	}
	disk := q.fs.Crash(1, vfs.SurviveAll)
	_ = q.engine.Close()
	q.fs, q.options.FS = disk, disk
	q.mustOpen()
	record := keys.Append(nil, keys.SpaceSystem, keys.RemovedKey(keys.Epoch(q.visible.Load())))
	var w batch.Builder
	w.SetRecord(keys.SpaceSystem, []byte("a"), nil) // the first of all keys: the step merges it alone
	q.commit(&w)
	q.interruptSteps()
	q.mustOpen()
	defer q.mustClose()
	r := q.engine.NewReader()
	q.slot.Enter()
	defer q.slot.Leave()
	if v, found, err := r.Get(record, keys.MaxEpoch); !found {
		t.Fatalf("the record of what the crash lost: found %v %+v, %v", found, v, err)
	}
}

// TestRepairOfTheLogKeepsWhatAnInterruptedMergeHas: a step of a merge has replaced the version of a key, in the tree or in
// quarantine, and the record of the new version is lost. The new version stays: the key does not lose both, and reads
// find it from the start on, also if the log has a version between them.
//
// With a full disk at the first start, which cannot merge the log then, it is the same.
func TestRepairOfTheLogKeepsWhatAnInterruptedMergeHas(t *testing.T) {
	for i := range 8 {
		key, between, full := "A", i%2 == 1, i >= 4 // the first of all keys: the step merges it alone
		if i%4 >= 2 {
			key += longKeys()[0]
		}
		q := newQuarantineBench(t, vfs.NewMem())
		q.options.disturb = nil
		q.mustOpen()
		q.set(key, "old")
		q.pair("first")
		if err := q.checkpointAt(); err != nil {
			t.Fatal(err)
		}
		if between { // the log keeps a version that is older than the one that stays
			q.set(key, "between")
		}
		q.pair("second")
		q.set(key, strings.Repeat("new", 1+i%3*300)) // in a leaf or in pages of its own
		q.interruptMerge()
		lost := q.loseLastRecord()
		if dropped, err := Inspect.Repair(q.fs, "db"); err != nil || dropped.From != lost || dropped.Parts != lost {
			t.Fatalf("repair: %v, %+v, lost is %d", err, dropped, lost)
		}
		faulty := vfs.NewFaulty(q.fs)
		q.options.FS = faulty
		var rule *vfs.Injected
		if full {
			rule = faulty.Inject(vfs.Rule{Op: vfs.OpWrite | vfs.OpPreallocate, Name: "*.ekv", Err: syscall.ENOSPC})
		}
		q.mustOpen()
		for range 2 {
			q.checkNow()
			if full && rule.Fired() == 0 {
				t.Fatal("the start has not met the full disk")
			}
			if full {
				rule.Remove()
			}
			if err := q.checkpointAt(); err != nil {
				t.Fatal(err)
			}
			q.mustClose()
			q.mustOpen()
		}
		q.mustClose()
	}
}

// TestRepairOfTheLogKeepsTheMetadataOfWhatAnInterruptedMergeHas: the version that stays, because only the tree has it, keeps its
// metadata, although a full disk makes the start copy it into a memtable.
func TestRepairOfTheLogKeepsTheMetadataOfWhatAnInterruptedMergeHas(t *testing.T) {
	fields := metadata.Fields{ExpiresAt: 1 << 40, Lease: 300}
	for _, value := range []string{"new", strings.Repeat("new", 300)} {
		q := newQuarantineBench(t, vfs.NewMem())
		q.options.disturb = nil
		q.mustOpen()
		q.set("A", "between")
		q.pair("second")
		var w batch.Builder
		w.SetStored(keys.KindSetMetadata, keys.SpaceUser, []byte("A"), append(fields.Append(nil), value...))
		q.commit(&w)
		q.interruptMerge()
		q.loseLastRecord()
		if _, err := Inspect.Repair(q.fs, "db"); err != nil {
			t.Fatal(err)
		}
		faulty := vfs.NewFaulty(q.fs)
		q.options.FS = faulty
		rule := faulty.Inject(vfs.Rule{Op: vfs.OpWrite | vfs.OpPreallocate, Name: "*.ekv", Err: syscall.ENOSPC})
		for range 2 {
			q.mustOpen()
			q.checkMetadata("A", fields, value)
			rule.Remove()
			if err := q.checkpointAt(); err != nil {
				t.Fatal(err)
			}
			q.checkMetadata("A", fields, value)
			if st := q.engine.Stats(); st.Quarantine.Versions != 0 {
				t.Fatalf("%d versions are in quarantine: %s", st.Quarantine.Versions, st.Quarantine.Reason)
			}
			q.mustClose()
		}
		if rule.Fired() == 0 {
			t.Fatal("the start has not met the full disk")
		}
	}
}

func (q *quarantineBench) checkMetadata(key string, want metadata.Fields, value string) {
	q.t.Helper()
	r := q.engine.NewReader()
	q.slot.Enter()
	defer q.slot.Leave()
	v, ok, err := r.Get(keys.Append(nil, keys.SpaceUser, []byte(key)), keys.MaxEpoch)
	if err != nil || !ok {
		q.t.Fatalf("%s: found %v, %v", key, ok, err)
	}
	fields, err := v.Metadata()
	got, readErr := r.AppendValue(nil, v)
	if err := errors.Join(err, readErr); err != nil || fields != want || string(got) != value {
		q.t.Fatalf("%s has %+v and %d bytes, %v; want %+v and %d bytes", key, fields, len(got), err, want, len(value))
	}
}
