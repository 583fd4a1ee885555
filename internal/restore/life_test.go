package restore

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/archive"
	"github.com/epochkv/epochkv/internal/backup"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/objectstore"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
	"github.com/epochkv/epochkv/internal/wal"
)

var soakLives = flag.Int("restore.lives", 2, "lives of stores in TestLifeOfAStore")

// never is the first epoch that must be restored while there is none.
const never = keys.MaxEpoch

// life is a store over many runs, in which options change, machines crash, and operations of disks and targets fail. The model knows the
// state after each commit, and which epochs must be restored.
type life struct {
	bench
	mem      *vfs.Mem
	faulty   *vfs.Faulty
	archives bool // in this run

	last    keys.Epoch            // newest one with a known state
	unsure  map[string]string     // state after a commit whose outcome is not known; nil without one
	vague   [][2]keys.Epoch       // epochs of which it is not known whether a commit is before them: from one to before another
	backups map[string]keys.Epoch // by id
	floor   keys.Epoch            // from here on to archived, each epoch must be restored
	broken  keys.Epoch            // first epoch after the last break of the archive
	through keys.Epoch            // archived
	did     []string
}

// TestLifeOfAStore: whatever happens in the runs of a store, a restored state is the model's of that epoch, and what the archive and the
// backups promise can be restored. Now and then the store that was restored goes on in place of the original.
func TestLifeOfAStore(t *testing.T) {
	base := testseed.Base(t)
	for i := range uint64(*soakLives) {
		t.Run(fmt.Sprint("seed=", base+i), func(t *testing.T) {
			t.Parallel() // it waits most of the time
			l := newLife(t, base+i)
			for range 14 {
				l.run()
				if l.rng.IntN(4) == 0 {
					l.proveRestores()
				}
			}
			l.proveRestores()
		})
	}
}

func newLife(t *testing.T, seed uint64) *life {
	store, err := objectstore.Open(t.TempDir(), objectstore.Options{})
	check(t, err)
	l := &life{bench: bench{t: t, dir: "db", target: objectstore.NewFaulty(store), rng: rand.New(rand.NewPCG(seed, 9))}, mem: vfs.NewMem()}
	l.begin(map[string]string{}, 0)
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(strings.Join(l.did, "\n"))
		}
	})
	return l
}

// begin begins the history of a store.
func (l *life) begin(now map[string]string, at keys.Epoch) {
	l.now, l.states, l.last = now, map[keys.Epoch]uint64{0: hash(now), at: hash(now)}, at
	l.vague, l.backups, l.floor, l.broken, l.through, l.unsure = nil, map[string]keys.Epoch{}, 0, 0, 0, nil
	if at > 0 {
		l.floor = never
	}
	l.history = keys.Lineage{}
}

func (l *life) tracef(format string, args ...any) {
	l.did = append(l.did, fmt.Sprintf(format, args...))
}

// run is one run of the server.
func (l *life) run() {
	l.faulty = vfs.NewFaulty(l.mem)
	l.archives, l.age, l.yields = l.rng.IntN(4) > 0, []time.Duration{0, time.Hour}[l.rng.IntN(2)], l.rng.IntN(2) == 0
	l.merge = archive.MergeOptions{Off: l.rng.IntN(2) == 0, Every: 3 * time.Millisecond, Files: 4, Bytes: 512 << 10, Grace: time.Nanosecond}
	l.tracef("run: archive %v, age %v, merges %v", l.archives, l.age, !l.merge.Off)
	l.forgetJobs()
	l.inject()
	if l.start() {
		for range 2 + l.rng.IntN(10) {
			if l.unsure != nil || l.mem.Crashed() {
				break
			}
			l.act()
		}
		l.end()
	}
	l.target.Heal()
	if l.mem.Crashed() || l.rng.IntN(3) == 0 {
		survival := vfs.Survival(l.rng.IntN(4))
		l.tracef("the machine crashes: %d", survival)
		l.mem = l.mem.Crash(l.rng.Uint64(), survival)
	}
}

// forgetJobs removes the leases of jobs that could not remove them: between two runs, as much time passes as ends them.
func (l *life) forgetJobs() {
	for _, dir := range []string{"base/jobs/", "restores/"} {
		check(l.t, l.target.List(l.t.Context(), l.history.String()+"/"+dir, func(o objectstore.Object) error {
			return l.target.Delete(l.t.Context(), o.Name)
		}))
	}
}

// inject lets one thing fail, or none.
func (l *life) inject() {
	switch l.rng.IntN(6) {
	case 0, 1:
		l.mem.CrashAt(l.mem.Mutations() + 1 + l.rng.Int64N(400))
	case 2:
		l.faulty.Inject(vfs.Rule{Op: vfs.OpSync | vfs.OpSyncData, Nth: 1 + l.rng.IntN(60), Fault: vfs.DiscardDirty})
	case 3:
		l.faulty.Inject(vfs.Rule{Op: vfs.OpMutating, Nth: 1 + l.rng.IntN(200), Err: []syscall.Errno{syscall.EIO, syscall.ENOSPC, syscall.EMFILE}[l.rng.IntN(3)]})
	}
	if l.rng.IntN(2) == 0 {
		kinds := []objectstore.FaultKind{objectstore.FailForGood, objectstore.FailForNow, objectstore.FailAfter, objectstore.ReadShort}
		l.target.Inject(objectstore.Fault{Nth: 1 + l.rng.IntN(40), Sticky: l.rng.IntN(2) == 0, Kind: kinds[l.rng.IntN(len(kinds))], Bytes: l.rng.Int64N(100)})
	}
}

// start opens the store, and compares it with the model. It reports false if a failure has prevented the start.
func (l *life) start() bool {
	o := l.options(l.dir)
	o.Storage.FS = l.faulty
	if !l.archives {
		o.Storage.ChangeLog.Archive = wal.HolderOptions{}
	}
	s, err := mvcc.Open(o)
	if err != nil {
		l.tracef("no start: %v", err)
		if errors.Is(err, wal.ErrCorrupt) {
			l.t.Fatal(err)
		}
		return false
	}
	l.store = s
	if h := s.History().Lineage; l.history != (keys.Lineage{}) && h != l.history {
		l.t.Fatalf("the store has another history, %v", h)
	}
	l.history = s.History().Lineage
	newest := s.Changes().Stable()
	got, err := readContents(s)
	switch {
	case err != nil && l.mem.Crashed(): // at a write of the store's own goroutines
		l.tracef("not read: %v", errors.Join(err, s.Close()))
		l.store = nil
		return false
	case err != nil:
		l.t.Fatal(err)
	case got == hash(l.now):
	case l.unsure != nil && got == hash(l.unsure):
		l.vague = append(l.vague, [2]keys.Epoch{l.last + 1, newest})
		l.now = l.unsure
		l.known(newest)
	default:
		l.t.Fatalf("after a start at epoch %d the store has another state than after epoch %d", newest, l.last)
	}
	l.unsure = nil
	s.HoldBulkLoads(l.archives)
	if l.archives {
		l.archive()
	}
	return true
}

// known notes the state after an epoch.
func (l *life) known(e keys.Epoch) { l.states[e], l.last = hash(l.now), e }

// end ends the archiver and the store.
func (l *life) end() {
	if l.archives {
		if l.rng.IntN(4) > 0 {
			l.target.Heal()
		}
		l.stop()
		l.look()
	}
	if l.rng.IntN(3) == 0 {
		l.tracef("killed")
		l.faulty.Inject(vfs.Rule{Op: vfs.OpMutating})
	}
	_ = l.store.Close()
	l.store = nil
}

// look takes over what the archiver says.
func (l *life) look() {
	s := l.arch.Status()
	l.through = max(l.through, s.Archived)
	if s.Refused() {
		l.t.Fatalf("refused: %v", s.Err)
	}
	if s.Breaks == 0 || s.Break == nil || s.Break.First == l.broken {
		return
	}
	l.tracef("the archive has begun anew at %d: %s", s.Break.First, s.Break.Reason)
	l.broken, l.floor = s.Break.First, never
	for _, e := range l.backups {
		if e >= l.broken-1 {
			l.floor = min(l.floor, e)
		}
	}
}

func (l *life) act() {
	switch l.rng.IntN(9) {
	case 0:
		l.bulk()
	case 1:
		l.tracef("checkpoint: %v", l.store.Checkpoint(l.t.Context()))
	case 2, 3:
		l.backup()
	case 4:
		l.pruneSome()
	case 5:
		l.target.Heal()
		for deadline := time.Now().Add(200 * time.Millisecond); l.archives && l.arch.Status().Archived < l.last && time.Now().Before(deadline); {
			time.Sleep(time.Millisecond)
		}
	default:
		for range 1 + l.rng.IntN(40) {
			if l.unsure == nil {
				l.commit()
			}
		}
	}
}

// commit commits something, and waits until it is durable. After an error its outcome is not known.
func (l *life) commit() {
	x, err := l.store.Session()
	if err != nil {
		l.unsure = maps.Clone(l.now)
		return
	}
	defer x.Close()
	next := maps.Clone(l.now)
	var w mvcc.Write
	for _, k := range l.rng.Perm(60)[:1+l.rng.IntN(4)] {
		key := fmt.Sprintf("key %03d", k)
		if l.rng.IntN(4) == 0 {
			w.Delete([]byte(key))
			delete(next, key)
			continue
		}
		next[key] = fmt.Sprintf("value %d %s", l.rng.Uint64(), strings.Repeat("x", l.rng.IntN(600)))
		w.Set([]byte(key), []byte(next[key]))
	}
	epoch, err := x.Commit(l.t.Context(), &w)
	if err == nil {
		err = l.store.Wait(l.t.Context(), epoch, mvcc.DurabilitySync)
	}
	l.outcome("commit", next, epoch, err)
}

func (l *life) outcome(what string, next map[string]string, epoch keys.Epoch, err error) {
	if err != nil {
		l.tracef("%s after epoch %d: %v", what, l.last, err)
		l.unsure = next
		return
	}
	l.now = next
	l.known(epoch)
}

func (l *life) bulk() {
	next := maps.Clone(l.now)
	load, err := l.store.BeginBulkLoad()
	if err != nil {
		l.tracef("no bulk load: %v", err)
		return
	}
	for range 1 + l.rng.IntN(60) {
		key := fmt.Sprintf("key %03d", l.rng.IntN(100))
		next[key] = fmt.Sprintf("loaded %d %s", l.rng.Uint64(), strings.Repeat("y", l.rng.IntN(800)))
		if err := load.Add([]byte(key), []byte(next[key])); err != nil {
			l.tracef("bulk load: %v", errors.Join(err, load.Close()))
			return
		}
	}
	done, err := load.Commit(l.t.Context())
	_ = load.Close()
	l.tracef("bulk load at %d: %v", done.Epoch, err)
	l.outcome("bulk load", next, done.Epoch, err)
}

func (l *life) backup() {
	ctx, cancel := context.WithTimeout(l.t.Context(), time.Second)
	defer cancel()
	o := backup.Options{PartBytes: 64 << 10}
	if l.rng.IntN(2) == 0 {
		o.Base = backup.LatestBase
	}
	m, err := backup.Create(ctx, l.store, l.target, o)
	if err != nil {
		l.tracef("backup: %v", err)
		return
	}
	e := keys.Epoch(m.State.Epoch)
	l.tracef("backup %s, %s, at %d", m.ID, m.Kind, e)
	l.backups[m.ID] = e
	if l.floor == never && e+1 >= l.broken {
		l.floor = e
	}
}

func (l *life) pruneSome() {
	ctx, cancel := context.WithTimeout(l.t.Context(), time.Second)
	defer cancel()
	oldest := keys.Epoch(0)
	o := backup.PruneOptions{KeepFull: l.rng.IntN(3), Log: func(ctx context.Context, at keys.Epoch) error {
		oldest = at
		_, err := archive.Prune(ctx, l.target, l.lineage(), at, false)
		return err
	}}
	r, err := backup.Prune(ctx, l.target, l.lineage().String(), o)
	l.tracef("prune of all but %d full ones, log before %d: %v", o.KeepFull, oldest, err)
	if r != nil {
		for _, id := range r.Backups {
			delete(l.backups, id)
		}
	}
	if err != nil { // some are gone: the newest one is not
		newest := ""
		for id := range l.backups {
			if newest == "" || l.backups[id] > l.backups[newest] || l.backups[id] == l.backups[newest] && id > newest {
				newest = id
			}
		}
		oldest = max(oldest, l.backups[newest])
		l.forgetAllBut(newest)
	}
	if l.floor != never {
		l.floor = max(l.floor, oldest)
	}
}

// forgetAllBut: it is not known whether the other backups are there.
func (l *life) forgetAllBut(id string) {
	maps.DeleteFunc(l.backups, func(other string, _ keys.Epoch) bool { return other != id })
}

// proveRestores restores random epochs, each backup's, and the newest state. Sometimes the store goes on as one of them.
func (l *life) proveRestores() {
	if l.history == (keys.Lineage{}) {
		return
	}
	if found, err := archive.Lineages(l.t.Context(), l.target); err != nil || !slices.Contains(found, l.history) {
		if err != nil || l.through > 0 || len(l.backups) > 0 {
			l.t.Fatalf("the history is not in the target: %v, %v", found, err)
		}
		return
	}
	targets := []archive.Target{{}, {Epoch: max(l.through, 1)}}
	seen := slices.Sorted(maps.Keys(l.states))
	for range 3 {
		targets = append(targets, archive.Target{Epoch: max(seen[l.rng.IntN(len(seen))], 1)}, archive.Target{Epoch: 1 + keys.Epoch(l.rng.Uint64N(uint64(max(l.last, 1))))})
	}
	for _, e := range l.backups {
		targets = append(targets, archive.Target{Epoch: e})
	}
	goesOn := l.rng.IntN(2) == 0
	for i, target := range targets {
		if dir, at := l.prove(target); dir != "" && goesOn && i >= 1 {
			l.goOn(dir, at)
			return
		}
	}
}

func (l *life) prove(target archive.Target) (dir string, at keys.Epoch) {
	l.t.Helper()
	dir = filepath.Join(l.t.TempDir(), "restored")
	r, err := Run(l.t.Context(), Options{Store: l.target, Target: target, Dir: dir, PageSize: 1024, Memory: 64 << 20, Lineage: l.lineage()})
	_, isKnown := l.states[target.Epoch] // others may have been lost in a crash
	must := target.Epoch != 0 && (isKnown && l.floor <= target.Epoch && target.Epoch <= l.through || slices.Contains(slices.Collect(maps.Values(l.backups)), target.Epoch))
	must = must || target.Epoch == 0 && l.floor <= l.through && l.through > 0
	switch {
	case err != nil && (must || !Unreachable(err)):
		l.t.Fatalf("%v; epochs from %d to %d, and of backups %v, must be restored: %v", &target, l.floor, l.through, l.backups, err)
	case err != nil:
		return "", 0
	case target.Epoch == 0 && r.Reached.Epoch < l.through && l.floor <= l.through:
		l.t.Fatalf("the newest state is of epoch %d, and epoch %d is archived", r.Reached.Epoch, l.through)
	}
	at = target.Epoch
	if at == 0 {
		at = r.Reached.Epoch
	}
	found := l.restored(dir)
	vague := slices.ContainsFunc(l.vague, func(r [2]keys.Epoch) bool { return r[0] <= at && at < r[1] })
	if !vague && hash(found) != l.state(at) || r.Reached.Epoch > at {
		l.t.Fatalf("%v: restored epoch %d from %q, with another state than epoch %d has", &target, r.Reached.Epoch, r.Base.ID, at)
	}
	return dir, r.Reached.Epoch
}

// restored is what a restored store has.
func (l *life) restored(dir string) map[string]string {
	l.t.Helper()
	mem := memOf(l.t, dir, l.dir)
	o := l.options(l.dir)
	o.Storage.FS, o.Storage.ChangeLog.Archive = mem, wal.HolderOptions{}
	s, err := mvcc.Open(o)
	check(l.t, err)
	defer func() { check(l.t, s.Close()) }()
	return everything(l.t, s)
}

// goOn replaces the store by one that was restored.
func (l *life) goOn(dir string, at keys.Epoch) {
	l.tracef("the restored store goes on after epoch %d", at)
	l.begin(l.restored(dir), at)
	l.mem = memOf(l.t, dir, l.dir)
}

// memOf is a file system in memory with a copy of a directory, durably.
func memOf(t *testing.T, dir, as string) *vfs.Mem {
	t.Helper()
	mem := vfs.NewMem()
	check(t, filepath.WalkDir(dir, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, name)
		if err != nil {
			return err
		}
		to := path.Join(as, filepath.ToSlash(rel))
		if d.IsDir() {
			return mem.MkdirAll(to)
		}
		data, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		f, err := mem.Open(to, vfs.Create)
		if err != nil {
			return err
		}
		_, err = f.WriteAt(data, 0)
		return errors.Join(err, f.Sync(), f.Close(), mem.SyncDir(path.Dir(to)))
	}))
	return mem
}

// everything is what a client reads.
func everything(t *testing.T, s *mvcc.Store) map[string]string {
	t.Helper()
	x, err := s.Session()
	check(t, err)
	defer x.Close()
	_, err = x.OpenSnapshot(0)
	check(t, err)
	defer x.CloseSnapshot()
	c, err := x.Scan(mvcc.ScanOptions{})
	check(t, err)
	found := map[string]string{}
	for c.Next() {
		found[string(c.Key())] = string(c.Value())
	}
	check(t, c.Err())
	return found
}
