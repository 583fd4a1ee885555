package scenarios

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/epochkv/epochkv/bench/harness"
	"github.com/epochkv/epochkv/bench/workload"
	"github.com/epochkv/epochkv/internal/backup"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/objectstore"
	"github.com/epochkv/epochkv/internal/storage"
)

const (
	backupStage = "backups"
	deviceArm   = "device"
	ioBytes     = 1 << 20
	mebibyte    = 1 << 20

	aloneArm        = "alone"
	besideArm       = "beside a backup"
	backupBandwidth = 50 << 20
	backupReadRate  = "MiB/s that backups read"
	// durableWriters take the arriving puts from one queue.
	durableWriters = 32
)

// The values of backups are long, so that a store of some size is soon made.
var backedUp = workload.Shape{KeyBytes: 16, ValueBytes: 1000}

// backups are scenarios about backup and restore, against the device, and about the log archive.
func backups() []harness.Scenario {
	const load, largeLoad = million / 2, 4 * million
	const size, largeSize = load * 1016 / mebibyte, largeLoad * 1016 / mebibyte // of keys and values, for the report: the data file's counts
	large := harness.Sizes{Size: largeSize, Load: largeLoad}
	one := harness.Axis{Name: "stores", Points: []int{1}}
	return append([]harness.Scenario{
		{
			Name: "backup-full", About: "A full backup to a target that takes everything at once, against reading the data file from one end to the other; the OS page cache is dropped before (4 GB with -large).",
			Unit: "MiB", Axis: one, Size: size, Fixed: true, Load: load, Large: large, Stage: backupStage,
			Arms:    []harness.Arm{{Name: ours.name, Run: runBackup}, {Name: deviceArm, Run: runDeviceRead}},
			Figures: []harness.Figure{{Arm: ours.name, Against: deviceArm, AtLeast: 0.8, Source: "full backup at least 0.8 of the device's sequential read"}},
		},
		{
			Name: "backup-puts", About: "Durable puts to random keys, which arrive at a fixed rate, alone and while backups are made one after the other, which read 50 MiB in a second.",
			Unit: "puts", Axis: harness.Axis{Name: "arrivals a second", Points: []int{1000, 5000}}, Size: size, Window: 5 * time.Second, Load: load, Large: large, Stage: backupStage, Show: harness.MeasureP99,
			Arms: []harness.Arm{{Name: aloneArm, Run: putsBeside(false)}, {Name: besideArm, Run: putsBeside(true)}},
			Figures: []harness.Figure{
				{Arm: besideArm, Against: aloneArm, Measure: harness.MeasureP99, AtMost: 1.3, Source: "put p99 at most 1.3 times beside a backup with 50 MiB/s"},
			},
		},
		{
			Name: "restore-full", About: "The state of a full backup written into a directory and verified, against writing as many bytes and syncing them.",
			Unit: "MiB", Axis: one, Size: size, Fixed: true, Load: load, Large: large, Stage: backupStage,
			Arms:    []harness.Arm{{Name: ours.name, Run: runRestoreBase}, {Name: deviceArm, Run: runDeviceWrite}},
			Figures: []harness.Figure{{Arm: ours.name, Against: deviceArm, AtLeast: 0.7, Source: "restore at least 0.7 of sequential write"}},
		},
		{
			Name: "restore-log", About: "A store made of the log archive alone: planning, replay, checkpoints and verification.",
			Unit: "records", Axis: one, Size: million, Fixed: true, Load: million, Large: harness.Sizes{Size: 5 * million, Load: 5 * million},
			Arms:    []harness.Arm{{Name: ours.name, Run: runRestoreLog}},
			Figures: []harness.Figure{{Arm: ours.name, AtLeast: 300_000, Source: "restore at least 300k records/s"}},
		},
	}, archives()...)
}

// stored is a store with data, and a directory for backups of it.
type stored struct {
	*workload.Store
	data   *workload.Data
	dir    string
	target objectstore.Store
}

func storedData(r *harness.Run) (*stored, error) {
	return harness.Shared(r, fmt.Sprintf("a store of %d keys", r.Load), func(dir string) (*stored, error) {
		return fillStore(r, dir, backedUp, storage.ChangeLog{})
	})
}

// fillStore loads a store through its log, and moves everything into its tree.
func fillStore(r *harness.Run, dir string, shape workload.Shape, log storage.ChangeLog) (*stored, error) {
	target, err := objectstore.Open(filepath.Join(dir, "target"), objectstore.Options{})
	if err != nil {
		return nil, err
	}
	s := &stored{data: workload.NewData(r.LoadSeed, r.Load, shape), dir: filepath.Join(dir, "store"), target: target}
	options := storeOptions(r, s.dir)
	options.Storage.ChangeLog = log
	if s.Store, err = workload.OpenStore(options); err != nil {
		return nil, err
	}
	var write mvcc.Write
	value := make([]byte, shape.ValueBytes)
	for i := range s.data.Count() {
		write.Reset()
		write.Durability = mvcc.DurabilityAsync
		write.Set(s.data.Key(i), s.value(value, i))
		if _, err := s.Own.Commit(r, &write); err != nil {
			return nil, errors.Join(err, s.Close())
		}
	}
	if err := errors.Join(s.Wait(r, s.Visible(), mvcc.DurabilitySync), s.Checkpoint(r), s.copyData()); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// copyData copies the data file, which the store makes smaller when it is idle: the device is measured with the copy.
func (s *stored) copyData() (err error) {
	from, err := os.Open(s.dataFile())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, from.Close()) }()
	to, err := os.Create(s.copyFile())
	if err != nil {
		return err
	}
	_, err = io.Copy(to, from)
	return errors.Join(err, to.Sync(), to.Close())
}

// value is half of a value of the data, which a backup compresses to next to nothing, and half random bytes.
func (s *stored) value(dst []byte, i int) []byte {
	dst = s.data.Value(dst, i)
	random := rand.NewPCG(uint64(i), 1)
	for at := len(dst) / 2; at+8 <= len(dst); at += 8 {
		binary.LittleEndian.PutUint64(dst[at:], random.Uint64())
	}
	return dst
}

func (s *stored) dataFile() string { return filepath.Join(s.dir, "data.ekv") }

func (s *stored) copyFile() string { return s.dir + ".copy" }

// sink is a target that forgets the content of its objects.
type sink struct {
	mu      sync.Mutex       // guards all fields
	sizes   map[string]int64 // of the objects, in bytes
	written int64
}

func newSink() *sink { return &sink{sizes: map[string]int64{}} }

func (s *sink) String() string { return "sink:" }

func (s *sink) Create(_ context.Context, name string, content objectstore.Content) error {
	r, err := content.Open()
	if err != nil {
		return err
	}
	size, err := io.Copy(io.Discard, r)
	if err = errors.Join(err, r.Close()); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sizes[name] = size
	s.written += size
	return nil
}

// Read tells whether an object exists and has so many bytes.
func (s *sink) Read(_ context.Context, name string, offset, length int64) (io.ReadCloser, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch size, exists := s.sizes[name]; {
	case !exists:
		return nil, objectstore.ErrNotFound
	case length != 0:
		return nil, fmt.Errorf("read %s: its content was not kept", name)
	case offset > size:
		return nil, objectstore.ErrShort
	}
	return io.NopCloser(bytes.NewReader(nil)), nil
}

func (s *sink) List(context.Context, string, func(objectstore.Object) error) error { return nil }

func (s *sink) Delete(_ context.Context, name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.sizes, name)
	return nil
}

func runBackup(r *harness.Run) error {
	s, err := storedData(r)
	if err != nil {
		return err
	}
	size, err := fileSize(s.dataFile())
	if err != nil {
		return err
	}
	if err := workload.DropPageCache(s.dir); err != nil {
		return err
	}
	to := newSink()
	var m *backup.Manifest
	err = r.TimeCounted(func() (_ int, err error) {
		m, err = backup.Create(r, s.Store, to, backup.Options{Idle: func() bool { return true }}) // as a server without requests says
		if err != nil {
			return 0, err
		}
		return int(m.LivePages) * m.State.PageSize / mebibyte, nil
	})
	if err != nil {
		return err
	}
	r.Count("compressed to", float64(to.written)/float64(size))
	if least := int64(s.data.Count()) * int64(backedUp.ValueBytes); int64(m.LivePages)*int64(m.State.PageSize) < least {
		return fmt.Errorf("the backup has %d pages, which cannot be the %d bytes that were loaded", m.LivePages, least)
	}
	return r.Verified(int(m.Pages), int(m.LivePages))
}

func fileSize(name string) (int64, error) {
	info, err := os.Stat(name)
	if err != nil {
		return 0, err
	}
	return info.Size(), nil
}

func runDeviceRead(r *harness.Run) (err error) {
	s, err := storedData(r)
	if err != nil {
		return err
	}
	size, err := fileSize(s.copyFile())
	if err != nil {
		return err
	}
	if err := workload.DropPageCache(filepath.Dir(s.copyFile())); err != nil {
		return err
	}
	file, err := os.Open(s.copyFile())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	var read int64
	err = r.Time(int(size/mebibyte), func() (err error) {
		read, err = io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{file}, make([]byte, ioBytes))
		return err
	})
	if err != nil {
		return err
	}
	return r.Verified(int(read), int(size))
}

// putsBeside writes for the run's window, with or without backups meanwhile.
func putsBeside(backups bool) func(*harness.Run) error {
	return func(r *harness.Run) error {
		s, err := storedData(r)
		if err != nil {
			return err
		}
		ctx, stop := context.WithCancel(r)
		defer stop()
		var pages uint64
		made := make(chan error, 1)
		began := time.Now()
		if backups {
			go func() { made <- s.backUpUntil(ctx, &pages) }()
		} else {
			made <- nil
		}
		var latencies []*harness.Recorder
		err = r.Time(max(int(float64(r.Point)*r.Window.Seconds()), 1), func() (err error) {
			latencies, err = s.put(r)
			return err
		})
		seconds := time.Since(began).Seconds()
		stop()
		if err := errors.Join(err, <-made); err != nil {
			return err
		}
		r.Latencies(latencies...)
		if backups {
			rate := float64(pages) * float64(s.Stats().Storage.Pages.PageSize) / mebibyte / seconds
			least, most := 0.5*backupBandwidth/mebibyte, 1.1*backupBandwidth/mebibyte
			if r.Smoke { // small backups, each of which begins at once
				least, most = math.SmallestNonzeroFloat64, math.MaxFloat64
			}
			if err := r.Prove(backupReadRate, rate, least, most); err != nil {
				return err
			}
		}
		return r.Verified(s.readable())
	}
}

// backUpUntil makes backups until ctx ends, and counts the pages that they read.
func (s *stored) backUpUntil(ctx context.Context, pages *uint64) error {
	for ctx.Err() == nil {
		before := uint64(0)
		_, err := backup.Create(ctx, s.Store, newSink(), backup.Options{Bandwidth: backupBandwidth, Progress: func(p backup.Progress) {
			*pages += p.Pages - before
			before = p.Pages
		}})
		if err != nil && ctx.Err() == nil {
			return err
		}
	}
	return nil
}

// put lets r.Point puts arrive in each second of the run's window, each durable, to random keys.
func (s *stored) put(r *harness.Run) (latencies []*harness.Recorder, err error) {
	writers := make([]*overwriter, durableWriters)
	for w := range writers {
		session, err := s.Session()
		if err != nil {
			return nil, err
		}
		defer session.Close()
		writers[w] = &overwriter{stored: s, session: session, random: rand.New(rand.NewPCG(r.Seed, uint64(w))), value: make([]byte, s.data.ValueBytes)}
	}
	latencies, late, err := harness.OpenLoop(float64(r.Point), r.Window, len(writers), func(w int) error { return writers[w].put(r) })
	if err == nil {
		r.Lateness(late)
	}
	return latencies, err
}

// overwriter writes the values that the keys have already, so that the store is for the next run what it was.
type overwriter struct {
	*stored
	session *mvcc.Session
	random  *rand.Rand
	value   []byte
	write   mvcc.Write
}

func (o *overwriter) put(ctx context.Context) error {
	i := o.random.IntN(o.data.Count())
	o.write.Reset()
	o.write.Durability = mvcc.DurabilitySync
	o.write.Set(o.data.Key(i), o.stored.value(o.value, i))
	epoch, err := o.session.Commit(ctx, &o.write)
	if err != nil {
		return err
	}
	return o.Wait(ctx, epoch, mvcc.DurabilitySync)
}

// readable counts those of a spread of the keys that have their values.
func (s *stored) readable() (right, want int) {
	expected := make([]byte, s.data.ValueBytes)
	for i := 0; i < s.data.Count(); i += max(s.data.Count()/5000, 1) {
		want++
		if v, err := s.Own.Get(nil, s.data.Key(i), 0); err == nil && v.Found && string(v.Data) == string(s.value(expected, i)) {
			right++
		}
	}
	return right, want
}
