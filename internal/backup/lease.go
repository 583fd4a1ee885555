package backup

import (
	"context"
	"errors"
	"fmt"
	"path"
	"strings"
	"time"

	"github.com/epochkv/epochkv/internal/objectstore"
)

// A lease says that a job runs: an object that its owner replaces by a new one each minute. A lease older than five minutes is of
// a job that died. Ages are by the clock of the target, which gives the objects their times.
//
// A backup takes its lease before it looks for that of a prune, and a prune takes its own before it looks for that of a backup:
// of two that begin together, one sees the other. The lease of an incremental backup names its base, so that a prune keeps that.
type lease struct {
	store  objectstore.Store
	dir    string
	prefix string // of its objects
	number int
	times  leaseTimes
	ended  chan struct{} // keep has returned
}

// leaseTimes are the times of leases. Zero fields take the defaults.
type leaseTimes struct {
	renew   time.Duration // between two objects; 1 min
	dead    time.Duration // age at which the owner has died; 5 min
	recheck time.Duration // while another job is waited for; 1 s
	release time.Duration // for removing the lease, at most; 3 s: a server that stops waits for it
}

func (t leaseTimes) withDefaults() leaseTimes {
	if t.renew == 0 {
		t.renew = time.Minute
	}
	if t.dead == 0 {
		t.dead = 5 * time.Minute
	}
	if t.recheck == 0 {
		t.recheck = time.Second
	}
	if t.release == 0 {
		t.release = 3 * time.Second
	}
	return t
}

type jobKind string

const (
	jobBackup jobKind = "backup"
	jobPrune  jobKind = "prune"

	backupJobs = jobsDir + string(jobBackup) + "-" // leases of backups
)

// ErrBusy means that another job on the target prevents this one.
var ErrBusy = errors.New("backup: another job uses the target")

func takeLease(ctx context.Context, store objectstore.Store, dir string, kind jobKind, id string, times leaseTimes) (*lease, error) {
	l := &lease{store: store, dir: dir, prefix: path.Join(dir, jobsDir, string(kind)+"-"+id) + "-", times: times.withDefaults(), ended: make(chan struct{})}
	return l, l.create(ctx)
}

func (l *lease) name() string { return fmt.Sprintf("%s%06d", l.prefix, l.number) }

func (l *lease) create(ctx context.Context) error {
	return objectstore.CreateOwn(ctx, l.store, l.name(), objectstore.Bytes("{}\n"))
}

// keep renews the lease in the background until the context ends, which comes before release. If that fails, it ends the job.
func (l *lease) keep(ctx context.Context, cancel context.CancelCauseFunc) {
	go func() {
		defer close(l.ended)
		l.renewUntilEnd(ctx, cancel)
	}()
}

func (l *lease) renewUntilEnd(ctx context.Context, cancel context.CancelCauseFunc) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(l.times.renew):
		}
		old := l.name()
		l.number++
		err := l.create(ctx)
		if err == nil {
			err = l.store.Delete(ctx, old)
		}
		if err != nil {
			cancel(fmt.Errorf("renewing the lease of the job: %w", err))
			return
		}
	}
}

// release removes the lease. If that fails, its object prevents jobs for some minutes.
func (l *lease) release() {
	<-l.ended
	ctx, cancel := context.WithTimeout(context.Background(), l.times.release)
	defer cancel()
	_ = l.store.Delete(ctx, l.name())
}

// now is the time of the target: when the newest object of the lease was created, as the target says.
func (l *lease) now(ctx context.Context) (time.Time, error) {
	var newest time.Time
	err := l.store.List(ctx, l.prefix, func(o objectstore.Object) error {
		if o.Created.After(newest) {
			newest = o.Created
		}
		return nil
	})
	if err == nil && newest.IsZero() {
		newest = time.Now()
	}
	return newest, err
}

// running returns an object below a prefix that is too young to be of a dead job, or "".
func (l *lease) running(ctx context.Context, prefix string) (name string, err error) {
	err = l.eachRunning(ctx, prefix, func(found string) { name = found })
	return name, err
}

// eachRunning calls each for the objects below a prefix that are too young to be of dead jobs.
func (l *lease) eachRunning(ctx context.Context, prefix string, each func(name string)) error {
	now, err := l.now(ctx)
	if err != nil {
		return err
	}
	return l.store.List(ctx, path.Join(l.dir, prefix), func(o objectstore.Object) error {
		if o.YoungerThan(l.times.dead, now) && !strings.HasPrefix(o.Name, l.prefix) {
			each(o.Name)
		}
		return nil
	})
}

// withBase is between the id of a backup and that of its base, in the name of its lease.
const withBase = "-of-"

// leaseID names a backup and its base, if it has one: a prune keeps that while the backup is made.
func (m *Manifest) leaseID() string {
	if m.Base == nil {
		return m.ID
	}
	return m.ID + withBase + m.Base.ID
}

// basesInUse are the ids of the bases of backups that are being made.
func (l *lease) basesInUse(ctx context.Context) (map[string]bool, error) {
	ids := map[string]bool{}
	err := l.eachRunning(ctx, backupJobs, func(name string) {
		if _, base, ok := strings.Cut(path.Base(name), withBase); ok {
			ids[base[:max(strings.LastIndexByte(base, '-'), 0)]] = true
		}
	})
	return ids, err
}

// awaitNone waits until no job of another kind runs, but not longer than a dead one is taken for a running one. An error of waiting, which is
// called meanwhile, ends it.
func (l *lease) awaitNone(ctx context.Context, kind jobKind, waiting func() error) error {
	for began := time.Now(); ; {
		name, err := l.running(ctx, jobsDir+string(kind)+"-")
		if name == "" || err != nil {
			return err
		}
		if time.Since(began) > l.times.dead {
			return fmt.Errorf("%w: %s", ErrBusy, name)
		}
		if err := waiting(); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(l.times.recheck):
		}
	}
}
