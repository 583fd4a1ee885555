package scenarios

import (
	"context"
	"errors"
	"math"
	"sync"
	"time"

	"github.com/epochkv/epochkv/bench/harness"
	"github.com/epochkv/epochkv/bench/workload"
	"github.com/epochkv/epochkv/internal/archive"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/objectstore"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

// The log archive beside puts that arrive at a fixed rate.
const (
	archiveShare    = "percent of a core for the archive"
	recoveryPoint   = "seconds that a loss would lose"
	archivePutsRate = 20_000
	// The interval is the server's default. It must be shorter than the recovery point by the time of an upload.
	recoveryPointMax = 5 * time.Second
	// A file of the archive is complete after the interval, and the windows have one at least.
	cpuWindow, recoveryWindow = 6 * time.Second, 12 * time.Second
)

func archives() []harness.Scenario {
	one := harness.Axis{Name: "stores", Points: []int{1}}
	return []harness.Scenario{
		{
			Name: "archive-cpu", About: "20,000 puts a second without an archive, with one in a directory, and without again: what the archive adds to the processor time, in percent of a core.",
			Unit: "puts", Axis: one, Size: 1, Fixed: true, Window: cpuWindow, Show: archiveShare,
			Arms:    []harness.Arm{{Name: ours.name, Isolated: true, Run: runArchiveCPU}},
			Figures: []harness.Figure{{Arm: ours.name, Measure: archiveShare, AtMost: 5, Source: "archive at most 5 % CPU at 20k puts/s"}},
		},
		{
			Name: "archive-recovery-point", About: "20,000 puts a second with an archive in a directory: the greatest age of a durable commit that is not in the archive yet, looked at every 10 ms.",
			Unit: "puts", Axis: one, Size: 1, Fixed: true, Window: recoveryWindow, Show: recoveryPoint,
			Arms:    []harness.Arm{{Name: ours.name, Isolated: true, Run: runRecoveryPoint}},
			Figures: []harness.Figure{{Arm: ours.name, Measure: recoveryPoint, AtMost: recoveryPointMax.Seconds(), Source: "recovery point 5 s"}},
		},
	}
}

// steadyPuts is a store with puts at a fixed rate, and its archive.
type steadyPuts struct {
	*workload.Store
	data     *workload.Data
	target   objectstore.Store
	archiver *archive.Archiver
	interval time.Duration
	puts     int
}

// openSteadyPuts opens an empty store. The window has time for several files.
func openSteadyPuts(r *harness.Run) (*steadyPuts, error) {
	target, err := objectstore.Open(r.Dir+"/archive", objectstore.Options{})
	if err != nil {
		return nil, err
	}
	p := &steadyPuts{data: workload.NewData(r.Seed, archivePutsRate, standard), target: target, interval: config.Default().Archive.Interval}
	if r.Smoke {
		p.interval = r.Window / 5
	}
	options := storeOptions(r, r.Dir+"/store")
	options.Storage.ChangeLog.Archive = archive.Hold(target.String(), false)
	if p.Store, err = workload.OpenStore(options); err != nil {
		return nil, err
	}
	p.archiver = archive.New(p.Changes(), archive.Options{
		Target: target, Interval: p.interval, FileBytes: int64(config.Default().Archive.FileSize),
		Identity: func() archive.Identity {
			h := p.History()
			return archive.Identity{Lineage: h.Lineage, StoreID: p.ID(), Level: p.FeatureLevel(), Parent: h.Parent}
		},
	})
	return p, nil
}

// archiving archives until the returned function is called.
func (p *steadyPuts) archiving(r *harness.Run) (stop func()) {
	ctx, cancel := context.WithCancel(r)
	var running sync.WaitGroup
	running.Go(func() { p.archiver.Run(ctx) })
	return func() {
		cancel()
		running.Wait()
	}
}

// await waits for a state of the archiver.
func (p *steadyPuts) await(r *harness.Run, done func(archive.Status) bool) error {
	for status := p.archiver.Status(); !done(status); status = p.archiver.Status() {
		if err := errors.Join(status.Err, r.Err()); err != nil {
			return err
		}
		time.Sleep(time.Millisecond)
	}
	return nil
}

// putsWindow is how long puts come: a smaller one than the scenario's would have no file.
func putsWindow(r *harness.Run, least time.Duration) time.Duration {
	if r.Smoke {
		return r.Window
	}
	return max(r.Window, least)
}

// putFor puts at the rate for a time. Puts that are late are made up for.
func (p *steadyPuts) putFor(ctx context.Context, window time.Duration) (count int, err error) {
	var write mvcc.Write
	value := make([]byte, p.data.ValueBytes)
	for began := time.Now(); ; time.Sleep(time.Millisecond) {
		elapsed := min(time.Since(began), window)
		for due := int(elapsed.Seconds() * archivePutsRate); count < due; count++ {
			i := p.puts % p.data.Count()
			write.Reset()
			write.Durability = mvcc.DurabilityAsync
			write.Set(p.data.Key(i), p.data.Value(value, p.puts))
			if _, err := p.Own.Commit(ctx, &write); err != nil {
				return count, err
			}
			p.puts++
		}
		if elapsed == window {
			return count, ctx.Err()
		}
	}
}

// verify waits for the archive, and counts the puts that it has.
func (p *steadyPuts) verify(r *harness.Run) error {
	if err := p.Wait(r, p.Visible(), mvcc.DurabilitySync); err != nil {
		return err
	}
	if err := p.await(r, func(s archive.Status) bool { return s.Archived >= p.Visible() }); err != nil {
		return err
	}
	plan, err := archive.NewPlan(r, p.target, p.History().Lineage, archive.Point{}, archive.Target{}, "")
	if err != nil {
		return err
	}
	puts, reader := 0, batch.Reader{}
	_, err = plan.Replay(r, func(rec archive.Record) error {
		if len(rec.Body) == 0 {
			return nil
		}
		if err := reader.Read(rec.Body); err != nil {
			return err
		}
		for reader.Next() {
			if keys.SpaceOf(reader.Key) == keys.SpaceUser {
				puts++
			}
		}
		return reader.Err()
	})
	if err != nil {
		return err
	}
	return r.Verified(puts, p.puts)
}

// proveRate proves that the puts came at the rate.
func proveRate(r *harness.Run, puts int, seconds float64) error {
	least := 0.95 * archivePutsRate
	if r.Smoke {
		least = math.SmallestNonzeroFloat64
	}
	return r.Prove("puts a second", float64(puts)/seconds, least, 1.05*archivePutsRate)
}

func runArchiveCPU(r *harness.Run) (err error) {
	p, err := openSteadyPuts(r)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	span := putsWindow(r, cpuWindow)
	if _, err := p.putFor(r, span/4); err != nil { // what is done once in the life of a log is not the puts'
		return err
	}
	before, err := p.processorShare(r, span)
	if err != nil {
		return err
	}
	stop := p.archiving(r)
	defer stop()
	if err := p.await(r, func(s archive.Status) bool { return s.Files > 0 }); err != nil { // the records before are not those of the window
		return err
	}
	files, puts := p.archiver.Status().Files, 0
	err = r.TimeCounted(func() (_ int, err error) {
		puts, err = p.putFor(r, span)
		return puts, err
	})
	if err != nil {
		return err
	}
	if err := errors.Join(proveRate(r, puts, r.Seconds()), p.verify(r), p.proveFiles(r, files)); err != nil {
		return err
	}
	stop()
	after, err := p.processorShare(r, span)
	if err != nil {
		return err
	}
	alone := (before + after) / 2 // a store that becomes older takes less or more by itself
	r.Count("percent of a core before it", 100*before)
	r.Count("percent of a core after it", 100*after)
	r.Count(archiveShare, 100*(r.CPUSeconds()/r.Seconds()-alone))
	return nil
}

// processorShare is the processor time that the puts of a time take, in cores.
func (p *steadyPuts) processorShare(ctx context.Context, span time.Duration) (float64, error) {
	before, began := harness.ProcessCPU(), time.Now()
	_, err := p.putFor(ctx, span)
	return (harness.ProcessCPU() - before).Seconds() / time.Since(began).Seconds(), err
}

// proveFiles proves that files were made since there were some. The last one of a window may be complete after it.
func (p *steadyPuts) proveFiles(r *harness.Run, before uint64) error {
	return r.Prove("files", float64(p.archiver.Status().Files-before), 1, math.Inf(1))
}

func runRecoveryPoint(r *harness.Run) (err error) {
	p, err := openSteadyPuts(r)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	stop := p.archiving(r)
	defer stop()
	if err := p.await(r, func(s archive.Status) bool { return s.Connected }); err != nil {
		return err
	}
	span := putsWindow(r, recoveryWindow)
	looking, end := context.WithCancel(r)
	worst := make(chan time.Duration, 1)
	go func() { worst <- p.greatestLag(looking) }()
	puts := 0
	err = r.TimeCounted(func() (_ int, err error) {
		puts, err = p.putFor(r, span)
		return puts, err
	})
	end()
	lost := <-worst
	if err != nil {
		return err
	}
	r.Count(recoveryPoint, lost.Seconds())
	return errors.Join(proveRate(r, puts, r.Seconds()), p.verify(r), p.proveFiles(r, 0))
}

// greatestLag looks at the archive until ctx ends.
func (p *steadyPuts) greatestLag(ctx context.Context) (worst time.Duration) {
	const every = 10 * time.Millisecond
	for ctx.Err() == nil {
		status := p.archiver.Status()
		worst = max(worst, status.Lag(time.Now()))
		time.Sleep(every)
	}
	return worst
}
