package archive

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/objectstore"
	"github.com/epochkv/epochkv/internal/testseed"
)

// process is one that wants to own an archive, with a target that has faults of its own.
type process struct {
	*owners
	target *objectstore.Faulty
	stop   context.CancelFunc // of its answers
}

// newProcess makes a process. It answers once it is the owner.
func newProcess(t *testing.T, store objectstore.Store, within time.Duration) *process {
	target := objectstore.NewFaulty(store)
	return &process{owners: newOwners(place{target, keys.Lineage{7}}, "", within), target: target, stop: func() {}}
}

func (p *process) start(ctx context.Context) error {
	err := p.acquire(ctx, func(context.Context) error { return nil }, func(ownerRecord) {})
	if err == nil {
		answering, stop := context.WithCancel(ctx)
		p.stop = stop
		p.answerUntil(answering)
	}
	return err
}

// kill ends a process without a word.
func (p *process) kill() {
	p.stop()
	p.answering.Wait()
}

func newStore(t *testing.T) objectstore.Store {
	t.Helper()
	store, err := objectstore.Open("file://"+t.TempDir(), objectstore.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return store
}

// TestOneOfManyProcessesIsTheOwner: of processes that start at once, one becomes the owner, and the others name it.
func TestOneOfManyProcessesIsTheOwner(t *testing.T) {
	store := newStore(t)
	results := make([]error, 8)
	processes := make([]*process, len(results))
	var wg sync.WaitGroup
	for i := range processes {
		processes[i] = newProcess(t, store, 2*time.Second)
		wg.Go(func() { results[i] = processes[i].start(t.Context()) })
	}
	wg.Wait()
	owners := 0
	for i, err := range results {
		inUse := new(InUseError)
		switch {
		case err == nil:
			owners++
			if err := processes[i].confirm(t.Context()); err != nil {
				t.Error(err)
			}
		case !errors.As(err, &inUse) || inUse.Lost || inUse.Process == 0:
			t.Error(err)
		}
		defer processes[i].kill()
	}
	if owners != 1 {
		t.Fatalf("%d owners", owners)
	}
}

// TestOwnershipSurvivesACrashAtEachCall: a process that ends at any of its calls, whether the call happened or not, and with any fault of
// the target, is replaced; the one before it never confirms that it is still the owner.
func TestOwnershipSurvivesACrashAtEachCall(t *testing.T) {
	kinds := map[objectstore.FaultKind]string{
		objectstore.FailForGood: "fails", objectstore.FailAfter: "answer is lost", objectstore.FailExists: "says it exists",
		objectstore.CreatePartial: "stores half", objectstore.CreateNothing: "stores nothing",
	}
	for kind, name := range kinds {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const within = 20 * time.Millisecond
			store := newStore(t)
			before := newProcess(t, store, within)
			if err := before.start(t.Context()); err != nil {
				t.Fatal(err)
			}
			for nth := 1; ; nth++ {
				before.kill()
				one := newProcess(t, store, within)
				rule := one.target.Inject(objectstore.Fault{Nth: nth, Sticky: kind == objectstore.FailForGood, Kind: kind})
				err := one.start(t.Context())
				fired := one.target.Fired(rule) > 0
				one.kill()
				next := newProcess(t, store, within)
				for next.start(t.Context()) != nil { // a record that is damaged is replaced, too
					if next.recentRefusal() != nil {
						t.Fatalf("call %d: %v", nth, next.recentRefusal())
					}
				}
				if err := next.confirm(t.Context()); err != nil {
					t.Fatalf("call %d: %v", nth, err)
				}
				if one.confirm(t.Context()) == nil || before.confirm(t.Context()) == nil {
					t.Fatalf("call %d: two owners", nth)
				}
				before = next
				if !fired {
					if err != nil {
						t.Fatal(err)
					}
					break
				}
			}
			before.kill()
		})
	}
}

// TestProcessThatIsEndedWhileItStartsIsNotWaitedFor: a stop at any call of the start leaves nothing that the next process has to ask.
func TestProcessThatIsEndedWhileItStartsIsNotWaitedFor(t *testing.T) {
	store := newStore(t)
	for _, kind := range []objectstore.FaultKind{objectstore.FailAfter, objectstore.FailForGood} {
		for nth, fired := 1, true; fired; nth++ {
			one := newProcess(t, store, time.Hour)
			ctx, cancel := context.WithCancel(t.Context())
			rule := one.target.Inject(objectstore.Fault{Nth: nth, Kind: kind})
			started := one.start(ctx)
			cancel()
			one.target.Heal()
			one.end(t.Context())
			if fired = one.target.Fired(rule) > 0; !fired && started != nil {
				t.Fatal(started)
			}
		}
	}
}

// TestNoTwoProcessesAreTheOwner: processes start, end and are killed in random order. Whatever happens, at most one of them is told that it
// is the owner.
func TestNoTwoProcessesAreTheOwner(t *testing.T) {
	rng, store := rand.New(rand.NewPCG(testseed.Base(t), 3)), newStore(t)
	var all []*process
	for range 30 {
		one := newProcess(t, store, 30*time.Millisecond)
		inUse := new(InUseError)
		if err := one.start(t.Context()); err != nil && !errors.As(err, &inUse) {
			t.Fatal(err)
		}
		all = append(all, one)
		confirmed := 0
		for _, p := range all {
			if p.confirm(t.Context()) == nil {
				confirmed++
			}
		}
		if confirmed > 1 {
			t.Fatalf("%d owners", confirmed)
		}
		switch some := all[rng.IntN(len(all))]; rng.IntN(3) {
		case 0:
			some.stop()
			some.end(t.Context())
		case 1:
			some.kill()
		}
	}
	for _, p := range all {
		p.kill()
	}
}

// TestOwnerThatAnswersIsNotReplaced: however often it is asked, and though its notes may be damaged.
func TestOwnerThatAnswersIsNotReplaced(t *testing.T) {
	store := newStore(t)
	owner := newProcess(t, store, 10*time.Second)
	if err := owner.start(t.Context()); err != nil {
		t.Fatal(err)
	}
	defer owner.kill()
	for range 3 {
		other, inUse := newProcess(t, store, 10*time.Second), new(InUseError)
		asks := make(chan error, 1)
		go func() { asks <- other.start(t.Context()) }()
		for done := false; !done; { // as before each file
			select {
			case err := <-asks:
				if done = true; !errors.As(err, &inUse) {
					t.Fatal(err)
				}
			default:
				if err := owner.confirm(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
		}
		if again := other.start(t.Context()); !errors.As(again, &inUse) || again.Error() != inUse.Error() {
			t.Fatal(again)
		}
	}
}

// endlessStore has objects without an end.
type endlessStore struct{ objectstore.Store }

func (s *endlessStore) Read(context.Context, string, int64, int64) (io.ReadCloser, error) {
	return io.NopCloser(new(endless)), nil
}

// endless is how often an object was read.
type endless int

var errReadOn = errors.New("more was read than is needed")

func (e *endless) Read(p []byte) (int, error) {
	if *e += endless(len(p)); *e > 1<<20 {
		return 0, errReadOn
	}
	return len(p), nil
}

// TestALargeNoteIsNotReadWhole: an object of any size with the name of a small one takes no memory.
func TestALargeNoteIsNotReadWhole(t *testing.T) {
	for name, read := range map[string]func(*place) error{
		"owner":   func(p *place) error { _, err := newOwners(*p, "", 0).read(t.Context(), 1); return err },
		"lineage": func(p *place) error { _, err := p.origin(t.Context()); return err },
	} {
		store := &endlessStore{Store: newStore(t)}
		if err := read(&place{store, keys.Lineage{7}}); errors.Is(err, errReadOn) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestNumberThatNoOwnerHasIsRefused: an object with the name of an owner of an impossible number is named, and no number begins anew after
// the largest.
func TestNumberThatNoOwnerHasIsRefused(t *testing.T) {
	for _, n := range []uint64{ownerMax, math.MaxUint64} {
		store := newStore(t)
		p := newProcess(t, store, time.Second)
		if err := store.Create(t.Context(), p.name(n, ""), objectstore.Bytes("{}")); err != nil {
			t.Fatal(err)
		}
		refusal := new(RefusedError)
		if err := p.start(t.Context()); !errors.As(err, &refusal) || !strings.Contains(err.Error(), fmt.Sprintf("%016x", n)) {
			t.Errorf("%x: %v", n, err)
		}
	}
}

// TestListThatLacksOwnersWithoutEndIsRefused: a target that has every name that is asked for does not keep the archiver busy for ever.
func TestListThatLacksOwnersWithoutEndIsRefused(t *testing.T) {
	refusal := new(RefusedError)
	if err := newProcess(t, everything{newStore(t)}, time.Second).start(t.Context()); !errors.As(err, &refusal) {
		t.Error(err)
	}
}

// everything has each object that is read.
type everything struct{ objectstore.Store }

func (everything) Read(context.Context, string, int64, int64) (io.ReadCloser, error) {
	return io.NopCloser(strings.NewReader("{}")), nil
}

// TestManyFilesWithTheSameEpochsAreRefused: a hostile archive, in which many files overlap, does not have each pair of them read. Names
// are enough for that.
func TestManyFilesWithTheSameEpochsAreRefused(t *testing.T) {
	for _, c := range []struct {
		files   int
		refused bool
	}{{40, false}, {60, true}} { // 780 and 1,770 pairs
		p := place{newStore(t), keys.Lineage{7}}
		for last := range c.files {
			if err := p.store.Create(t.Context(), p.name(logDir, FileName(1, keys.Epoch(last+1))), objectstore.Bytes("")); err != nil {
				t.Fatal(err)
			}
		}
		overlap := new(OverlapError)
		if _, err := NewPlan(t.Context(), p.store, p.lineage, Point{}, Target{}, ""); errors.As(err, &overlap) != c.refused || err == nil {
			t.Errorf("%d files: %v", c.files, err)
		}
	}
}

// leavingStore is a store of which each read is left until it is released.
type leavingStore struct {
	objectstore.Store // nil
	reads             int
	returned          chan struct{}
}

func (s *leavingStore) Read(context.Context, string, int64, int64) (io.ReadCloser, error) {
	s.reads++
	return nil, &objectstore.LeftError{Returned: s.returned, Cause: context.DeadlineExceeded}
}

// TestALookThatWasLeftIsTheOnlyOne: each that is left keeps a thread, and after so many of them the target is not used.
func TestALookThatWasLeftIsTheOnlyOne(t *testing.T) {
	store := &leavingStore{returned: make(chan struct{})}
	o := newOwners(place{store, keys.Lineage{7}}, "", time.Hour)
	o.become(1)
	for range 3 {
		o.look(t.Context())
	}
	if store.reads != 1 {
		t.Errorf("%d reads were left by looks", store.reads)
	}
	close(store.returned)
	for want := 2; want <= 3; want++ {
		if o.look(t.Context()); store.reads != want {
			t.Errorf("after the read has returned, there were %d, want %d", store.reads, want)
		}
	}
}
