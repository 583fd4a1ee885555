package users

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/testseed"
)

// hashes is a hasher of which nothing runs yet, and the jobs of its clients.
type hashes struct {
	*hasher
	t testing.TB

	mu       sync.Mutex
	executed []string         // clients, in the order of their jobs
	ended    map[string]int   // jobs of each client that have been executed
	failed   map[string]error // the last error of each client
	jobs     sync.WaitGroup
}

// ofClient is the key of the name of a client in a context.
type ofClient struct{}

func newHashes(t testing.TB, goroutines int) *hashes {
	x := &hashes{hasher: newHasher(cheap), t: t, ended: map[string]int{}, failed: map[string]error{}}
	x.count = goroutines
	x.client = func(ctx context.Context) string { return ctx.Value(ofClient{}).(string) } //nolint:forcetypeassert // each job has one
	return x
}

// ask adds a job of a client, and more to it.
func (x *hashes) ask(ctx context.Context, client string, more ...func()) {
	x.jobs.Go(func() {
		err := x.do(context.WithValue(ctx, ofClient{}, client), func() {
			x.mu.Lock()
			x.executed = append(x.executed, client)
			x.mu.Unlock()
			for _, f := range more {
				f()
			}
		})
		x.mu.Lock()
		defer x.mu.Unlock()
		if err != nil {
			x.failed[client] = err
		} else {
			x.ended[client]++
		}
	})
}

// start runs the hasher until the returned function is called.
func (x *hashes) start(ctx context.Context) (end func()) {
	ctx, stop := context.WithCancel(ctx)
	go x.run(ctx, func() {})
	return func() { stop(); <-x.hasher.ended }
}

// refused is whether the last error of a client is that of a full queue.
func (x *hashes) refused(client string) bool {
	limit, ok := errors.AsType[*auth.LimitError](x.failed[client])
	return ok && limit.Limit == hashQueue && limit.Retry > 0
}

// TestAPasswordWaitsForOneOfEachOtherClient, and for those that are being hashed: however many logins others have begun before.
func TestAPasswordWaitsForOneOfEachOtherClient(t *testing.T) {
	for _, goroutines := range []int{1, hashersMax} {
		for floods, each := range map[int]int{1: 40, 8: 2 * hashQueue} {
			t.Run(fmt.Sprintf("%d of %d clients, %d goroutines", each, floods, goroutines), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					x := newHashes(t, goroutines)
					end := x.start(t.Context())
					release := make(chan struct{})
					for i := range floods {
						for range each {
							x.ask(t.Context(), fmt.Sprint("flood", i), func() { <-release })
						}
					}
					synctest.Wait()
					x.ask(t.Context(), "another")
					synctest.Wait()
					close(release)
					x.jobs.Wait()
					end()
					i := slices.Index(x.executed, "another")
					if most := floods + 2*goroutines; i < 0 || i > most {
						t.Errorf("the job was executed after %d others, of at most %d: %v", i, most, x.failed["another"])
					}
				})
			})
		}
	}
}

// TestPasswordsOfAClientAreHashedInTheirOrder, and with all goroutines.
func TestPasswordsOfAClientAreHashedInTheirOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := newHashes(t, hashersMax)
		end := x.start(t.Context())
		var order []int
		for i := range 10 {
			x.ask(t.Context(), "home", func() {
				x.mu.Lock()
				order = append(order, i)
				x.mu.Unlock()
				time.Sleep(time.Second)
			})
			time.Sleep(time.Millisecond)
		}
		began := time.Now()
		x.jobs.Wait()
		if took := time.Since(began); !slices.IsSorted(order) || took > 10*time.Second/hashersMax {
			t.Errorf("%v in %v", order, took)
		}
		end()
	})
}

// TestPlacesOfTheQueueAreShared: a client may have all places as long as others need none; then it loses its newest to a client with fewer.
func TestPlacesOfTheQueueAreShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := newHashes(t, 1)
		ask := func(client string, n int) {
			for range n {
				x.ask(t.Context(), client)
				synctest.Wait()
			}
		}
		of := func(client string) int { return x.queue.Of(client) }
		ask("flood", hashQueue)
		if of("flood") != hashQueue || x.failed["flood"] != nil {
			t.Errorf("a client has %d places: %v", of("flood"), x.failed["flood"])
		}
		if ask("flood", 1); of("flood") != hashQueue || !x.refused("flood") {
			t.Errorf("a client has %d places: %v", of("flood"), x.failed["flood"])
		}
		delete(x.failed, "flood")
		if ask("another", 1); of("another") != 1 || of("flood") != hashQueue-1 || !x.refused("flood") {
			t.Errorf("a client has %d places, and one with none got %d: %v, %v", of("flood"), of("another"), x.failed["flood"], x.failed["another"])
		}
		ask("", hashQueue) // of no known client
		if of("") != hashQueue/2-1 || of("flood") != hashQueue/2 || of("another") != 1 || !x.refused("") {
			t.Errorf("clients have %d, %d and %d places", of(""), of("flood"), of("another"))
		}
		if x.failed["another"] != nil {
			t.Errorf("a client with one place lost it: %v", x.failed["another"])
		}
		for i := range 2 * hashQueue {
			ask(fmt.Sprint("client", i), 1)
		}
		if x.waiting() != hashQueue || of("another") != 1 || of("client0") != 1 || of("flood") != 1 || !x.refused(fmt.Sprint("client", 2*hashQueue-1)) {
			t.Errorf("%d wait", x.waiting())
		}
		end := x.start(t.Context())
		x.jobs.Wait()
		end()
		if len(x.executed) != hashQueue || x.ended["another"] != 1 || x.computed.Load() != hashQueue {
			t.Errorf("%d were executed", len(x.executed))
		}
	})
}

// TestPasswordsOfClientsThatLeaveGoAtOnce: they keep no place and take no turn.
func TestPasswordsOfClientsThatLeaveGoAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := newHashes(t, 1)
		ctx, leave := context.WithCancel(t.Context())
		for range hashQueue {
			x.ask(ctx, "gone")
		}
		synctest.Wait()
		leave()
		synctest.Wait()
		if n := x.waiting(); n != 0 || !errors.Is(x.failed["gone"], context.Canceled) {
			t.Errorf("%d places are taken: %v", n, x.failed["gone"])
		}
		for range hashQueue {
			x.ask(t.Context(), "home")
		}
		synctest.Wait()
		x.ask(ctx, "gone again")
		synctest.Wait()
		if x.failed["home"] != nil {
			t.Errorf("one that has left took a place: %v", x.failed["home"])
		}
		end := x.start(t.Context())
		x.jobs.Wait()
		end()
		if x.ended["home"] != hashQueue || x.ended["gone"] != 0 || x.ended["gone again"] != 0 || x.computed.Load() != hashQueue {
			t.Errorf("executed: %v", x.ended)
		}
	})
}

// TestAPasswordOfAClientThatHasLeftTakesNoTurn, if the hasher comes before its goroutine has removed it.
func TestAPasswordOfAClientThatHasLeftTakesNoTurn(t *testing.T) {
	x := newHashes(t, 1)
	gone, leave := context.WithCancel(t.Context())
	job := func(ctx context.Context, client string) *hashJob {
		j := &hashJob{ctx: ctx, done: make(chan error, 1)}
		if x.join(client, j) == nil {
			t.Fatal("no place is free")
		}
		return j
	}
	job(gone, "home")
	want := []*hashJob{job(t.Context(), "home"), job(t.Context(), "another"), job(t.Context(), "home"), nil}
	leave()
	for i, j := range want {
		if got := x.take(); got != j {
			t.Errorf("turn %d is not that of the job", i)
		}
	}
}

// TestPasswordsAfterTheEndOfTheHasher: all are told, however many they are, and none keeps a place.
func TestPasswordsAfterTheEndOfTheHasher(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := newHashes(t, hashersMax)
		end := x.start(t.Context())
		release := make(chan struct{})
		for range hashQueue {
			x.ask(t.Context(), "home", func() { <-release })
		}
		synctest.Wait()
		go func() { time.Sleep(time.Second); close(release) }()
		end() // of those that are being hashed, and of no others
		synctest.Wait()
		if x.ended["home"] != hashersMax || !errors.Is(x.failed["home"], mvcc.ErrClosed) || x.waiting() != 0 {
			t.Errorf("%d were executed, %d wait: %v", x.ended["home"], x.waiting(), x.failed["home"])
		}
		for range 2 * hashQueue {
			if err := x.do(context.WithValue(t.Context(), ofClient{}, "late"), func() {}); !errors.Is(err, mvcc.ErrClosed) {
				t.Fatal(err)
			}
		}
	})
}

// TestPasswordsOfManyClientsAtOnce: each is executed, or told why not, while clients leave at any moment.
func TestPasswordsOfManyClientsAtOnce(t *testing.T) {
	const clients, each, rounds = 12, 20, 20
	seed := testseed.Base(t)
	x := newHashes(t, hashersMax)
	end := x.start(t.Context())
	var executed, answered, refused, left atomic.Int64
	for i := range clients {
		for k := range each {
			x.jobs.Go(func() {
				rng := rand.New(rand.NewPCG(seed, uint64(i*each+k)))
				for range rounds {
					ctx, cancel := context.WithTimeout(context.WithValue(t.Context(), ofClient{}, fmt.Sprint(i)), time.Duration(rng.IntN(2000))*time.Microsecond)
					done, takes := false, time.Duration(rng.IntN(10))*time.Microsecond
					err := x.do(ctx, func() { done = true; executed.Add(1); time.Sleep(takes) })
					switch {
					case err == nil:
						answered.Add(1)
						if !done {
							t.Error("a job was answered that was not executed")
						}
					case errors.As(err, new(*auth.LimitError)):
						refused.Add(1)
					case errors.Is(err, context.DeadlineExceeded):
						left.Add(1)
					default:
						t.Error(err)
					}
					cancel()
				}
			})
		}
	}
	x.jobs.Wait()
	end()
	if n := answered.Load() + refused.Load() + left.Load(); n != clients*each*rounds || executed.Load() < answered.Load() || uint64(executed.Load()) != x.computed.Load() {
		t.Errorf("%d answers; %d were executed, %d answered, %d counted", n, executed.Load(), answered.Load(), x.computed.Load())
	}
	if n := x.waiting(); n != 0 || x.busy.Load() != 0 {
		t.Errorf("%d wait", n)
	}
	t.Logf("%d answered, %d refused, %d left", answered.Load(), refused.Load(), left.Load())
}
