package mvcc

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/metadata"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

var modelSeeds = flag.Int("model.seeds", 8/(1+3*testseed.RaceDetector), "runs of TestSessionsAgreeWithTheModel")

const (
	modelSteps = 220
	modelKeys  = 150
	modelTrace = 30 // steps that are printed after a failure
)

// TestSessionsAgreeWithTheModel: one goroutine does with several sessions whatever sessions can do, so that a map of all versions
// (modelState) tells each outcome, the old values and epochs in it, the kind of its error, and what is in the expiry queue. Batches have few
// keys, or so many that what they read is read before the latches; then another session may commit between the look before the latches and
// the latches. Meanwhile there are checkpoints, collections, caches without room, deadlines that pass, restarts and crashes.
//
// The last run of an ordinary test has a fresh seed, which its name tells: EPOCHKV_SEED=N -model.seeds 1 repeats it, and with -model.seeds 5000 it
// is the first of many.
func TestSessionsAgreeWithTheModel(t *testing.T) {
	base, total := testseed.Base(t), map[string]int{}
	var seeds []uint64
	for i := range uint64(*modelSeeds) {
		seeds = append(seeds, base+i)
	}
	if base == 0 {
		seeds = append(seeds, uint64(time.Now().UnixNano()))
	}
	for _, seed := range seeds {
		if !t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) { modelRun(t, seed, total) }) {
			t.FailNow()
		}
	}
	t.Log(total)
	for _, what := range []string{"put", "refused", "invoke", "type error", "delete range", "disturbed", "conflict", "commit", "snapshot", "snapshot gone", "crash", "restart", "deadlines", "repeated"} {
		if total[what] == 0 && *modelSeeds >= 100 {
			t.Errorf("no %s: this tests nothing", what)
		}
	}
}

// modelDriver is one run.
type modelDriver struct {
	t       *testing.T
	rng     *rand.Rand
	total   map[string]int
	trace   []string
	mem     *vfs.Mem
	o       Options
	wall    *atomic.Int64 // hours that have passed
	m       modelState
	durable keys.Epoch

	s       *Store
	x       *Session // of plain requests
	other   *Session // commits between a look and the latches of x, or of a transaction
	latched bool     // the latches of what is under way are held, or were
	sent    []*Request
	recent  []string // keys that decide whether transactions conflict
	txns    []*modelTxn
	views   []*modelView
}

// modelView is a snapshot that is read later.
type modelView struct {
	x  *Session
	at keys.Epoch
}

func modelRun(t *testing.T, seed uint64, total map[string]int) {
	r := &modelDriver{t: t, rng: rand.New(rand.NewPCG(seed, 0)), total: total, mem: vfs.NewMem(), wall: new(atomic.Int64)}
	r.o = tiny(r.mem)
	r.o.GCInterval, r.o.RequestWindow = time.Hour, 200*365*24*time.Hour // the driver collects, and all ids are known
	r.o.WallClock = func() time.Time { return time.Now().Add(time.Duration(r.wall.Load()) * time.Hour) }
	if r.one(2) {
		r.o.Storage.PageSize, r.o.Storage.CacheBytes = 512, 16<<10
	}
	defer func() {
		if r.endAll(); r.s != nil {
			_ = closeInTime(r.s)
		}
		if t.Failed() {
			t.Logf("%s=%d repeats it; the last steps:\n%s", testseed.Variable, seed, strings.Join(r.trace, "\n"))
		}
	}()
	r.m.truncate(0)
	r.open()
	for range modelSteps {
		r.step()
		if t.Failed() {
			return
		}
	}
	r.compareAll()
	r.endAll()
	mustClose(t, r.s)
}

// one is true once in n times.
func (r *modelDriver) one(n int) bool { return r.rng.IntN(n) == 0 }

func (r *modelDriver) note(what, format string, args ...any) {
	r.total[what]++
	line := fmt.Sprintf("%d: %s ", r.m.visible, what) + fmt.Sprintf(format, args...)
	if len(line) > 300 {
		line = line[:300] + "..."
	}
	r.trace = append(r.trace[max(0, len(r.trace)-modelTrace):], line)
}

func (r *modelDriver) open() {
	s, err := Open(r.o)
	if err != nil {
		r.t.Fatal(err)
	}
	r.s = s
	r.x, r.other = mustSession(r.t, s), mustSession(r.t, s)
	r.x.Permit(r.underLatches)
	r.adopt()
	r.passDeadlines()
	r.compareAll()
}

func (r *modelDriver) underLatches() error {
	r.latched = true
	return nil
}

func (r *modelDriver) step() {
	switch n := r.rng.IntN(100); {
	case n < 18:
		r.put(r.t.Context(), r.x, r.write(r.size(), r.request()))
	case n < 30:
		r.invoke()
	case n < 34:
		r.deleteRange()
	case n < 72:
		r.inTxn()
	case n < 80:
		r.read()
	case n < 84:
		r.view()
	case n < 87:
		r.askOutcome()
	case n < 95:
		r.maintain()
	case n < 97:
		r.compareAll()
	case n < 98:
		r.wall.Add(int64(1 + r.rng.IntN(6)))
		r.passDeadlines()
	default:
		r.restart()
	}
	if at := r.s.Visible(); at != r.m.visible {
		r.t.Errorf("the newest epoch is %d, want %d", at, r.m.visible)
	}
}

func (r *modelDriver) key() string {
	n := r.rng.IntN(modelKeys)
	if len(r.recent) > 0 && r.one(6) {
		return r.recent[max(0, len(r.recent)-1-r.rng.IntN(8))]
	}
	if n%20 == 0 {
		return fmt.Sprintf("k%03d", n) + strings.Repeat("long", 10)
	}
	return fmt.Sprintf("k%03d", n)
}

// keys are n keys in any order.
func (r *modelDriver) keys(n int) (list []string) {
	if n == 1 && len(r.recent) > 0 && r.one(2) {
		return []string{r.recent[len(r.recent)-1]}
	}
	for len(list) < n {
		if k := r.key(); !slices.Contains(list, k) {
			list = append(list, k)
		}
	}
	return list
}

// size is a number of keys: few, or enough for readBefore.
func (r *modelDriver) size() int {
	if r.one(3) {
		return 32 + r.rng.IntN(80)
	}
	return 1 + r.rng.IntN(5)
}

// value is a number, or bytes that are in the leaf, or beside it.
func (r *modelDriver) value() string {
	n := 0
	switch r.rng.IntN(10) {
	case 0:
	case 1, 2, 3:
		return fmt.Sprint(r.rng.IntN(200) - 100)
	case 4, 5, 6:
		n = r.rng.IntN(60)
	case 7, 8:
		n = r.rng.IntN(500)
	default:
		n = r.rng.IntN(3000)
	}
	return strings.Repeat(string(rune('a'+r.rng.IntN(26))), n)
}

func (r *modelDriver) deadline() uint64 {
	if !r.one(3) {
		return 0
	}
	return uint64(r.o.WallClock().Add(time.Duration(1+r.rng.IntN(12))*time.Hour + 30*time.Minute).UnixMilli())
}

func (r *modelDriver) bounds() (lower, upper string) {
	if lower, upper = r.key(), r.key(); r.one(4) {
		lower = ""
	}
	if r.one(4) {
		return lower, ""
	}
	return min(lower, upper), max(lower, upper)
}

func bound(key string) []byte {
	if key == "" {
		return nil
	}
	return []byte(key)
}

func (r *modelDriver) durability() Durability { return Durability(r.rng.IntN(3)) }

// request is none, a new one, or one that was made before, perhaps with something else to do.
func (r *modelDriver) request() *Request {
	switch {
	case !r.one(5):
		return nil
	case r.one(3) && len(r.sent) > 0:
		again := *r.sent[r.rng.IntN(len(r.sent))]
		if r.one(8) {
			again.Hash++ // another request has the id, if it was applied
		}
		return &again
	}
	n := r.rng.IntN(1200)
	made := &Request{ID: requestID(r.s.now()), Hash: r.rng.Uint32(), Identity: 3, Method: uint8(r.rng.IntN(9))}
	made.Result = func() []byte { return make([]byte, n) }
	r.sent = append(r.sent, made)
	return made
}

// conditions are mostly such that hold.
func (r *modelDriver) conditions() (list []Condition) {
	if r.one(2) {
		return nil
	}
	for _, k := range r.keys(r.size()) {
		v := r.m.newest(k)
		c := Condition{Key: []byte(k), Kind: KeyAbsent, ReturnCurrent: r.one(2)}
		if v.found {
			c.Kind, c.Value, c.Epoch = KeyPresent+ConditionKind(r.rng.IntN(3)), []byte(v.value), v.epoch
		}
		if r.one(60) {
			c.Kind, c.Value = KeyAbsent+ConditionKind(r.rng.IntN(5)), []byte(r.value())
		}
		list = append(list, c)
	}
	return list
}

// modelWrite is a commit and what it changes.
type modelWrite struct {
	Write

	changes map[string]modelChange
	sent    *Request
}

func (r *modelDriver) write(n int, request *Request) *modelWrite {
	w := &modelWrite{changes: map[string]modelChange{}, sent: request}
	w.Durability, w.Conditions = r.durability(), r.conditions()
	w.Identify(request)
	for _, k := range r.keys(n) {
		v := modelVersion{found: true, value: r.value(), deadline: r.deadline()}
		switch {
		case r.one(4):
			v = modelVersion{}
			w.Delete([]byte(k))
		case v.deadline == 0 && r.one(2):
			w.SetShared([]byte(k), []byte(v.value))
		default:
			w.SetWithMetadata([]byte(k), []byte(v.value), &metadata.Fields{ExpiresAt: v.deadline})
		}
		w.changes[k] = modelChange{modelVersion: v}
	}
	return w
}

// disturbed is a context under which another session sometimes commits while no latch is held: a write of some of the keys, or of the
// same request.
func (r *modelDriver) disturbed(list []string, request *Request) context.Context {
	r.latched = false
	when, asked, seed := r.rng.IntN(6), 0, r.rng.Uint64()
	if r.one(3) || len(list) == 0 {
		return r.t.Context()
	}
	return &interfering{Context: r.t.Context(), do: func() {
		if asked++; asked <= when || asked > when+2 || r.latched {
			return
		}
		own := r.rng // how often a context is asked depends on the cache
		defer func() { r.rng = own }()
		r.rng = rand.New(rand.NewPCG(seed, uint64(asked)))
		r.note("disturbed", "")
		w := &modelWrite{changes: map[string]modelChange{}}
		if r.one(4) && request != nil {
			again := *request
			w.sent = &again
			w.Identify(w.sent)
		}
		for range 1 + r.rng.IntN(3) {
			k, v := list[r.rng.IntN(len(list))], modelVersion{found: true, value: r.value(), deadline: r.deadline()}
			if _, ok := w.changes[k]; ok {
				continue
			}
			if r.one(3) {
				v = modelVersion{}
				w.Delete([]byte(k))
			} else {
				w.SetWithMetadata([]byte(k), []byte(v.value), &metadata.Fields{ExpiresAt: v.deadline})
			}
			w.changes[k] = modelChange{modelVersion: v}
		}
		r.put(r.t.Context(), r.other, w)
		if r.one(3) {
			r.maintain()
		}
	}}
}

func (r *modelDriver) put(ctx context.Context, x *Session, w *modelWrite) {
	r.note("put", "%d keys, %d conditions, request %v: %q", len(w.changes), len(w.Conditions), w.sent != nil, slices.Sorted(maps.Keys(w.changes)))
	if x == r.x {
		if r.one(40) {
			r.badInput(w)
		}
		list := slices.Sorted(maps.Keys(w.changes))
		for i := range w.Conditions {
			list = append(list, string(w.Conditions[i].Key))
		}
		ctx = r.disturbed(list, w.sent)
	}
	epoch, err := x.Commit(ctx, &w.Write)
	if !r.refused(err, w.sent, w.Conditions) {
		r.committed(epoch, err, w.changes, w.sent, w.Durability)
	}
}

// badInput changes nothing.
func (r *modelDriver) badInput(w *modelWrite) {
	bad := Write{Conditions: w.Conditions}
	if _, err := r.x.Commit(r.t.Context(), &bad); !errors.Is(err, ErrEmptyBatch) {
		r.t.Errorf("a batch without operations: %v", err)
	}
	bad.Delete([]byte("twice"))
	bad.Set([]byte("twice"), nil)
	if _, err := r.x.Commit(r.t.Context(), &bad); !errors.As(err, new(*batch.DuplicateKeyError)) {
		r.t.Errorf("a key that is written twice: %v", err)
	}
}

// refused compares a refusal with what the model says: of a request that was sent before, or of a condition. It returns false if the
// model has none.
func (r *modelDriver) refused(err error, request *Request, conditions []Condition) bool {
	known, reused := r.m.repeated(request)
	first := r.m.refusal(conditions)
	switch {
	case reused:
		if !errors.Is(err, ErrRequestReused) {
			r.t.Errorf("the id of another request: %v", err)
		}
	case known != nil && known.state == OutcomeCancelled:
		if !errors.Is(err, ErrRequestCancelled) && !errors.As(err, new(*ConflictError)) { // the next attempt is told
			r.t.Errorf("a request that was cancelled: %v", err)
		}
	case known != nil:
		var applied *AppliedError
		if !errors.As(err, &applied) {
			r.t.Errorf("a request that was applied: %v", err)
			return true
		}
		r.compareOutcome(applied.Outcome, known)
	case first >= 0:
		r.compareRefusal(err, first, &conditions[first])
	default:
		return false
	}
	if known != nil {
		r.note("repeated", "%v", err)
	}
	return true
}

func (r *modelDriver) compareOutcome(out Outcome, known *modelRequest) {
	if out.State != known.state || out.Epoch != known.epoch || string(out.Result) != known.result || out.Method != known.sent.Method || out.Identity != known.sent.Identity {
		r.t.Errorf("outcome %+v, want state %d, epoch %d, %d bytes", out, known.state, known.epoch, len(known.result))
	}
}

func (r *modelDriver) compareRefusal(err error, first int, c *Condition) {
	r.note("refused", "%v", err)
	var failed *PreconditionError
	if !errors.As(err, &failed) {
		r.t.Errorf("condition %d does not hold: %v", first, err)
		return
	}
	v := r.m.newest(string(c.Key))
	if c.Kind == LockHeld {
		v = modelVersion{}
	}
	epoch := failed.Epoch == v.epoch || !v.found && failed.Epoch == 0 // a merge has dropped the deletion
	size, value := 0, ""
	if c.ReturnCurrent && v.found {
		if size = len(v.value); size <= CurrentValueBytesMax {
			value = v.value
		}
	}
	if failed.Index != first || failed.Found != v.found || !epoch || failed.ValueSize != size || string(failed.Value) != value {
		r.t.Errorf("refused: %+v, want condition %d and %+.40v", failed, first, v)
	}
}

// committed notes a commit that must have happened.
func (r *modelDriver) committed(epoch keys.Epoch, err error, changes map[string]modelChange, request *Request, d Durability) {
	if err == nil {
		err = r.s.Wait(r.t.Context(), epoch, d)
	}
	if err != nil || epoch != r.m.visible+1 {
		r.t.Errorf("epoch %d, want %d: %v", epoch, r.m.visible+1, err)
		return
	}
	c := modelCommit{epoch: epoch, changes: changes}
	if request != nil {
		c.request = &modelRequest{sent: *request, state: OutcomeApplied, epoch: epoch}
		if request.Result != nil {
			c.request.result = string(request.Result())
		}
		if len(c.request.result) > resultBytesMax {
			c.request.state, c.request.result = OutcomeResultDropped, ""
		}
	}
	r.m.apply(c)
	if d != DurabilityAsync {
		r.durable = epoch
	}
	for _, v := range changes {
		if v.deadline != 0 && v.deadline <= r.s.now() { // a transaction has set it before the clock jumped
			r.passDeadlines()
			return
		}
	}
}
