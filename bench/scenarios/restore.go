package scenarios

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/epochkv/epochkv/bench/harness"
	"github.com/epochkv/epochkv/bench/workload"
	"github.com/epochkv/epochkv/internal/archive"
	"github.com/epochkv/epochkv/internal/backup"
	"github.com/epochkv/epochkv/internal/restore"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/vfs"
)

// backedUpData is the store, and a backup of it in its target.
func backedUpData(r *harness.Run) (*stored, *backup.Manifest, error) {
	s, err := storedData(r)
	if err != nil {
		return nil, nil, err
	}
	dir := backup.Dir(s.History().Lineage, s.ID())
	all, _, err := backup.List(r, s.target, dir)
	if err != nil {
		return nil, nil, err
	}
	if len(all) > 0 {
		return s, all[len(all)-1], nil
	}
	m, err := backup.Create(r, s.Store, s.target, backup.Options{})
	return s, m, err
}

func runRestoreBase(r *harness.Run) error {
	s, m, err := backedUpData(r)
	if err != nil {
		return err
	}
	size, err := fileSize(s.dataFile())
	if err != nil {
		return err
	}
	err = r.Time(int(size/mebibyte), func() error {
		return backup.RestoreBase(r, s.target, m, vfs.NewOS(), r.Dir, backup.RestoreOptions{})
	})
	if err != nil {
		return err
	}
	return verifyRestored(r, s, r.Dir)
}

// verifyRestored reads a spread of the keys from a restored directory.
func verifyRestored(r *harness.Run, original *stored, dir string) error {
	store, err := workload.OpenStore(storeOptions(r, dir))
	if err != nil {
		return err
	}
	restored := &stored{Store: store, data: original.data}
	right, want := restored.readable()
	return errors.Join(store.Close(), r.Verified(right, want))
}

// runDeviceWrite writes as many bytes as the data file has.
func runDeviceWrite(r *harness.Run) (err error) {
	s, _, err := backedUpData(r)
	if err != nil {
		return err
	}
	size, err := fileSize(s.dataFile())
	if err != nil {
		return err
	}
	file, err := os.Create(filepath.Join(r.Dir, "written"))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	block := make([]byte, ioBytes)
	random := rand.NewChaCha8([32]byte{})
	_, _ = random.Read(block) // never fails
	blocks := int(size / ioBytes)
	err = r.Time(blocks, func() error {
		for range blocks {
			if _, err := file.Write(block); err != nil {
				return err
			}
		}
		return file.Sync()
	})
	if err != nil {
		return err
	}
	written, err := fileSize(file.Name())
	return errors.Join(err, r.Verified(int(written), blocks*ioBytes))
}

// runRestoreLog archives the log of a store, and makes another one of it.
func runRestoreLog(r *harness.Run) error {
	s, err := harness.Shared(r, fmt.Sprintf("an archive of %d records", r.Load), func(dir string) (*stored, error) { return archived(r, dir) })
	if err != nil {
		return err
	}
	dir := filepath.Join(r.Dir, "restored")
	var report *restore.Report
	err = r.Time(r.Load, func() (err error) {
		report, err = restore.Run(r, restore.Options{Store: s.target, Target: archive.Target{Epoch: s.Visible()}, Dir: dir, Memory: 4 << 30})
		return err
	})
	if err != nil {
		return err
	}
	if err := r.Prove("records replayed", float64(report.Records), float64(r.Load), float64(r.Load)); err != nil {
		return err
	}
	return verifyRestored(r, s, dir)
}

// archived is a store, and the archive of its whole log.
func archived(r *harness.Run, dir string) (s *stored, err error) {
	s, err = fillStore(r, dir, standard, storage.ChangeLog{Archive: archive.Hold("archive", false)})
	if err != nil {
		return nil, err
	}
	const fileBytes = 16 << 20 // the default
	a := archive.New(s.Changes(), archive.Options{
		Target: s.target, Interval: time.Second, FileBytes: fileBytes,
		Identity: func() archive.Identity {
			h := s.History()
			return archive.Identity{Lineage: h.Lineage, StoreID: s.ID(), Level: s.FeatureLevel(), Parent: h.Parent}
		},
	})
	ctx, stop := context.WithCancel(r)
	var archiver sync.WaitGroup
	archiver.Go(func() { a.Run(ctx) })
	for status := a.Status(); err == nil && status.Archived < s.Visible(); status = a.Status() {
		time.Sleep(10 * time.Millisecond)
		err = errors.Join(status.Err, ctx.Err())
	}
	stop()
	archiver.Wait()
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}
