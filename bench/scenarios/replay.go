package scenarios

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/epochkv/epochkv/bench/harness"
	"github.com/epochkv/epochkv/bench/workload"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/vfs"
)

func replay() harness.Scenario {
	return harness.Scenario{
		Name: "replay", About: "Opening a store that died: reading the log and filling memtables from it.",
		Unit: "records", Axis: harness.Axis{Name: "value bytes", Points: []int{100}}, Size: million,
		Arms:    []harness.Arm{{Name: "epochkv", Run: runReplay}},
		Figures: []harness.Figure{{Arm: "epochkv", AtLeast: 700_000, Source: "replay at least 700k records/s"}},
	}
}

// runReplay writes records, copies the directory while the store is open (what a crash would leave), and opens the copy.
func runReplay(r *harness.Run) error {
	d := workload.NewData(r.Seed, r.Size, workload.Shape{KeyBytes: 16, ValueBytes: r.Point})
	died := filepath.Join(r.Dir, "died")
	if err := writeAndDie(r, d, filepath.Join(r.Dir, "live"), died); err != nil {
		return err
	}
	var store *mvcc.Store
	err := r.Time(r.Size, func() (err error) {
		store, err = mvcc.Open(storeOptions(r, died))
		return err
	})
	if err != nil {
		return err
	}
	defer func() { _ = store.Close() }() // the directory is thrown away
	if err := r.Prove("replayed", float64(store.Recovery().Records), float64(r.Size), float64(r.Size)); err != nil {
		return err
	}
	return verifyStore(r, store, d)
}

func storeOptions(r *harness.Run, dir string) mvcc.Options {
	o := storage.Options{Dir: dir, MemoryBytes: 4 << 30}
	if r.Smoke {
		o.MemtableBytes, o.SegmentBytes = smokeBuffer, smokeBuffer
	}
	return mvcc.Options{Storage: o}
}

func writeAndDie(r *harness.Run, d *workload.Data, live, died string) error {
	// Checkpoints would go on while the directory is copied, which no crash does: the data file's disk is full for them.
	files := vfs.NewFaulty(vfs.NewOS())
	options := storeOptions(r, live)
	options.Storage.FS = files
	store, err := workload.OpenStore(options)
	if err != nil {
		return err
	}
	files.Inject(vfs.Rule{Op: vfs.OpWrite | vfs.OpPreallocate, Name: "data.ekv", Err: syscall.ENOSPC})
	var write mvcc.Write
	value := make([]byte, d.ValueBytes)
	for i := range d.Count() {
		write.Reset()
		write.Durability = mvcc.DurabilityAsync
		write.Set(d.Key(i), d.Value(value, i))
		if _, err := store.Own.Commit(context.Background(), &write); err != nil {
			return fmt.Errorf("record %d: %w", i, errors.Join(err, store.Close()))
		}
	}
	err = store.Wait(context.Background(), store.Visible(), mvcc.DurabilitySync)
	if err == nil {
		err = copyTree(live, died)
	}
	return errors.Join(err, store.Close())
}

// copyTree copies regular files only: the lock stays with the live store.
func copyTree(from, to string) error {
	return filepath.WalkDir(from, func(name string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		target := filepath.Join(to, name[len(from):])
		if entry.IsDir() {
			return os.MkdirAll(target, 0o755)
		}
		content, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		return os.WriteFile(target, content, 0o644)
	})
}

func verifyStore(r *harness.Run, store *mvcc.Store, d *workload.Data) error {
	session, err := store.Session()
	if err != nil {
		return err
	}
	defer session.Close()
	right, expected := 0, make([]byte, d.ValueBytes)
	for i := range d.Count() {
		v, err := session.Get(nil, d.Key(i), 0)
		if err != nil {
			return err
		}
		if v.Found && string(v.Data) == string(d.Value(expected, i)) {
			right++
		}
	}
	return r.Verified(right, d.Count())
}
