package archive

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/objectstore"
)

// The *owner* of an archive is the process that creates its files. Two copies of one store have the same lineage and the same id, and
// the files of both would have names of their own, so the archive says which process is its owner:
//
//	<lineage>/owners/<n>         owner number n: a process, and since when it runs
//	<lineage>/owners/<n>-asked   another process wants to be number n
//	<lineage>/owners/<n>-ended   number n has ended, and creates nothing more
//
// The process with the highest number is the owner. An object is created once, so of all processes that want a number, one gets it. A
// process that finds the newest owner ended takes the next number at once. Otherwise it asks for the number and waits: an owner that
// runs answers by taking the number itself, and one that was killed does not answer. It need not be asked if it had the lock of the data
// directory that this process has now: the system takes the lock away only at its end. No clocks are compared: the process that waits counts
// its own seconds after its question is durable, and the object decides if the answer comes at the same time.
//
// An owner whose number was taken by another process stops: it looks for questions every few seconds, and before each file. A file that is
// being created then is given up when the owner has not found for some time that nothing asks it, see ownership.

// Times of the protocol.
const (
	// answerWithin is how long an owner has time for its answer: several looks for questions, with a slow target.
	answerWithin = 30 * time.Second
	// answerLooks is how often an owner looks for a question in this time.
	answerLooks = 6
	// askAgainFactor is how many of these times a process waits after another one has refused it.
	askAgainFactor = 20
	// sureShare is for which share of answerWithin an owner is sure that no other process has taken over, once it has found no
	// question: the rest is for what the target does with a request that is given up.
	sureShare = 2. / 3
)

const (
	ownersDir    = "owners"
	askedSuffix  = "-asked"
	endedSuffix  = "-ended"
	ownerFileMax = 4 << 10
	ownerFormat  = 1
	// ownerMax is more than processes can have archived a store: a name with a larger number is none of ours.
	ownerMax = 1 << 40
	// unlistedMax is how many owners a list may lack.
	unlistedMax   = 1000
	unknownMoment = "an unknown time"
)

// ownerRecord is the content of an object of an owner.
type ownerRecord struct {
	Format  int       `json:"format"` // 1
	Session string    `json:"session"`
	Host    string    `json:"host"`
	Process int       `json:"process"`
	Since   time.Time `json:"since"` // by the clock of the host; only people read it
	Lock    string    `json:"lock"`  // which lock of a data directory the process has; empty if it is not known
}

// Owner is a process that archives a store, as it says itself.
type Owner struct {
	Session string // names it among all processes
	Host    string
	Process int
	Since   time.Time // zero if it is not known
	Self    bool      // it is this process
}

func (r *ownerRecord) owner() Owner {
	return Owner{Session: r.Session, Host: r.Host, Process: r.Process, Since: r.Since}
}

// OwnerOf is the newest process that has archived a lineage to a place, which may have ended; false without any.
func OwnerOf(ctx context.Context, store objectstore.Store, lineage keys.Lineage) (Owner, bool, error) {
	o := owners{place: place{store, lineage}}
	n, r, err := o.newest(ctx)
	return r.owner(), n > 0, err
}

// InUseError means that another process archives the same store to the same place.
type InUseError struct {
	Owner
	Lost bool   // this process was the owner before
	Late string // a file that this process was creating when it lost the archive: it may have arrived
}

func (e *InUseError) Error() string {
	since := unknownMoment
	if !e.Since.IsZero() {
		since = e.Since.UTC().Format(time.RFC3339)
	}
	what := "archives a copy of this store to the same place"
	if e.Lost {
		what = "has taken over the archive of this store, because this process did not answer in time"
	}
	late := ""
	if e.Late != "" {
		late = fmt.Sprintf(". The file %s, which this process was creating then, may be in the archive: its history is that of this process", e.Late)
	}
	return fmt.Sprintf("archive: refused: process %d on host %q, which runs since %s, %s. "+
		"End one of the two; a copy that goes on by itself needs a restore, or another place for its archive%s", e.Process, e.Host, since, what, late)
}

// owners is how this process takes part in the protocol.
type owners struct {
	// Constant.
	place  place
	self   ownerRecord
	within time.Duration

	once      sync.Once // starts answer
	answering sync.WaitGroup
	lookLeft  <-chan struct{} // owned by answer: closed when the call of the last look has returned; nil unless that was left

	mu      sync.Mutex  // guards what follows
	number  uint64      // of this process; zero while it is not the owner
	tried   uint64      // a number that this process may have without knowing; zero if there is none
	lost    *InUseError // why it is not the owner any more
	refused *InUseError // the last refusal
	askAt   time.Time   // not before; zero without a refusal
	sureAt  time.Time   // when this process began to look for questions and found none
}

func newOwners(p place, lock string, within time.Duration) *owners {
	return &owners{place: p, self: newSession(lock), within: cmp.Or(within, answerWithin)}
}

// newSession names a process in its archives.
func newSession(lock string) ownerRecord {
	var id [16]byte
	_, _ = rand.Read(id[:])  // never fails: it ends the program instead
	host, _ := os.Hostname() // only people read it
	host = host[:min(len(host), 255)]
	return ownerRecord{Format: ownerFormat, Session: hex.EncodeToString(id[:]), Host: host, Process: os.Getpid(), Since: time.Now().UTC().Truncate(time.Second), Lock: lock}
}

func (o *owners) name(n uint64, suffix string) string {
	return o.place.name(ownersDir, fmt.Sprintf("%016x%s", n, suffix))
}

// acquire makes this process the owner, or returns an error: *InUseError if another one is. Before it takes or
// asks for a number, fits must return nil: a store that the archive does not fit must not keep another one from it. waiting is told that an answer is waited for.
func (o *owners) acquire(ctx context.Context, fits func(context.Context) error, waiting func(before ownerRecord)) error {
	if err := o.recentRefusal(); err != nil {
		return err
	}
	n, owner, err := o.newest(ctx)
	if err != nil {
		return err
	}
	if n > 0 && owner.Session == o.self.Session {
		o.become(n) // the answer to its creation was lost
		return nil
	}
	ended := n == 0 || owner.Lock != "" && owner.Lock == o.self.Lock
	if !ended {
		if ended, err = o.exists(ctx, o.name(n, endedSuffix)); err != nil {
			return err
		}
	}
	if err := fits(ctx); err != nil {
		return err
	}
	if !ended {
		waiting(owner)
		if err := o.ask(ctx, n); err != nil {
			return err
		}
	}
	return o.take(ctx, n+1)
}

// recentRefusal is the last refusal, until it is time to ask again.
func (o *owners) recentRefusal() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.refused == nil || time.Now().After(o.askAt) {
		return nil
	}
	return o.refused
}

// newest finds the owner with the highest number; zero if there is none. A list may lack the newest objects, so it goes on from there
// by names.
func (o *owners) newest(ctx context.Context) (n uint64, r ownerRecord, err error) {
	err = o.place.store.List(ctx, o.place.name(ownersDir)+"/", func(object objectstore.Object) error {
		digits, suffix, _ := strings.Cut(path.Base(object.Name), "-")
		if at, err := strconv.ParseUint(digits, 16, 64); err == nil && suffix == "" && o.name(at, "") == object.Name {
			n = max(n, at)
		}
		return nil
	})
	if err != nil {
		return 0, r, err
	}
	if n > 0 && n < ownerMax {
		if r, err = o.read(ctx, n); err != nil {
			return 0, r, err
		}
	}
	for listed := n; ; {
		if n >= ownerMax || n-listed > unlistedMax {
			return 0, r, &RefusedError{fmt.Sprintf("%s is none of the notes that processes make, each of which has the next number; remove it, and archive this store to a place of its own if it comes back", o.name(n, ""))}
		}
		next, err := o.read(ctx, n+1)
		if errors.Is(err, objectstore.ErrNotFound) {
			return n, r, nil
		}
		if err != nil {
			return 0, r, err
		}
		n, r = n+1, next
	}
}

// read reads which process has a number. Content that cannot be read is that of an unknown process, which has to be asked.
func (o *owners) read(ctx context.Context, n uint64) (r ownerRecord, err error) {
	data, err := o.place.read(ctx, o.name(n, ""), 0, -1)
	if err != nil && !errors.Is(err, ErrDamaged) {
		return r, err
	}
	return parseOwner(data[:min(len(data), ownerFileMax)]), nil
}

func parseOwner(data []byte) (r ownerRecord) {
	if json.Unmarshal(data, &r) != nil || r.Format != ownerFormat {
		return ownerRecord{}
	}
	return r
}

// exists reports whether there is an object. It is read by its name: a list may be late.
func (o *owners) exists(ctx context.Context, name string) (bool, error) {
	_, err := o.place.read(ctx, name, 0, -1)
	if errors.Is(err, objectstore.ErrNotFound) {
		return false, nil
	}
	if errors.Is(err, ErrDamaged) {
		err = nil // it is there
	}
	return err == nil, err
}

// create creates an object with the name of this process. It is no error if there is one.
func (o *owners) create(ctx context.Context, name string) error {
	data, err := json.Marshal(&o.self)
	if err != nil {
		return err
	}
	if err = o.place.store.Create(ctx, name, objectstore.Bytes(append(data, '\n'))); errors.Is(err, objectstore.ErrExists) {
		return nil
	}
	return err
}

// ask asks owner n whether it runs, and returns nil when it had time to answer, has answered, or has ended.
func (o *owners) ask(ctx context.Context, n uint64) error {
	asked := o.name(n+1, askedSuffix)
	if err := o.create(ctx, asked); err != nil {
		return err
	}
	if there, err := o.exists(ctx, asked); err != nil || !there {
		return errors.Join(err, fmt.Errorf("archive: %s was created, and cannot be read", asked))
	}
	for began := time.Now(); time.Since(began) < o.within && ctx.Err() == nil; {
		sleep(ctx, o.within/(2*answerLooks))
		for _, name := range []string{o.name(n+1, ""), o.name(n, endedSuffix)} {
			if done, err := o.exists(ctx, name); err != nil || done {
				return err
			}
		}
	}
	return ctx.Err()
}

// take takes a number, unless another process has it.
func (o *owners) take(ctx context.Context, n uint64) error {
	o.try(n)
	if err := o.create(ctx, o.name(n, "")); err != nil {
		return err
	}
	owner, err := o.read(ctx, n)
	if err != nil {
		return err // also if a target loses what it has acknowledged
	}
	if owner.Session == o.self.Session {
		o.become(n)
		return nil
	}
	return o.refuse(owner)
}

func (o *owners) try(n uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.tried = n
}

func (o *owners) become(n uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.number, o.tried, o.lost, o.refused = max(n, o.number), 0, nil, nil
}

// refuse notes that another process is the owner.
func (o *owners) refuse(owner ownerRecord) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	late := ""
	if o.refused != nil {
		late = o.refused.Late
	}
	o.refused = &InUseError{Owner: owner.owner(), Lost: o.number != 0 || o.lost != nil, Late: late}
	if o.refused.Lost {
		o.lost = o.refused
	}
	o.number, o.tried, o.askAt = 0, 0, time.Now().Add(askAgainFactor*o.within)
	return o.refused
}

// confirm returns nil if this process is the owner, and answers if another one asks.
func (o *owners) confirm(ctx context.Context) error {
	began := time.Now()
	o.mu.Lock()
	n, lost := o.number, o.lost
	o.mu.Unlock()
	if lost != nil {
		return lost
	}
	if n == 0 {
		return errNotOwner
	}
	owner, err := o.read(ctx, n)
	if errors.Is(err, objectstore.ErrNotFound) || err == nil && owner.Session != o.self.Session {
		o.forget(n)
		return errors.Join(errNotOwner, err)
	}
	if err != nil {
		return err
	}
	asked, err := o.exists(ctx, o.name(n+1, askedSuffix))
	if err != nil {
		return err
	}
	if asked {
		return o.take(ctx, n+1)
	}
	o.surely(n, began)
	return nil
}

// notOwner reports whether an error means that this process must connect again before it creates another file.
func notOwner(err error) bool {
	inUse := new(InUseError)
	return errors.Is(err, errNotOwner) || errors.As(err, &inUse)
}

// errNotOwner means that the archive does not say any more that this process is its owner: the objects were deleted or changed.
var errNotOwner = errors.New("archive: the note that this process archives the store is gone; it is made again")

// forget ends the ownership of a number.
func (o *owners) forget(n uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.number == n {
		o.number = 0
	}
}

// answerUntil answers questions until ctx ends.
func (o *owners) answerUntil(ctx context.Context) {
	o.once.Do(func() { o.answering.Go(func() { o.answer(ctx) }) })
}

// answer answers questions until ctx ends, also while a call of the archiver to the target does not return.
func (o *owners) answer(ctx context.Context) {
	for ctx.Err() == nil {
		sleep(ctx, o.within/answerLooks)
		o.look(ctx)
	}
}

// look answers a question if there is one. A call that hangs must not keep the next look from being in time; but one that is left to the kernel
// keeps a thread, and while it runs there is no other look: a device that does not answer to it answers to none.
func (o *owners) look(ctx context.Context) {
	select {
	case <-o.lookLeft:
	default:
		if o.lookLeft != nil {
			return
		}
	}
	o.lookLeft = nil
	ctx, cancel := context.WithTimeout(ctx, o.within/4)
	defer cancel()
	if left, is := errors.AsType[*objectstore.LeftError](o.confirm(ctx)); is { // other errors are the archiver's: it confirms before each file
		o.lookLeft = left.Returned
	}
}

// end lets the next process become the owner at once. The context of answerUntil has ended.
func (o *owners) end(ctx context.Context) {
	o.answering.Wait()
	o.release(ctx)
}

// release ends the ownership.
func (o *owners) release(ctx context.Context) {
	o.mu.Lock()
	n, tried := o.number, o.tried
	o.number, o.tried = 0, 0
	o.mu.Unlock()
	if tried != 0 {
		if owner, err := o.read(ctx, tried); err == nil && owner.Session == o.self.Session {
			n = tried
		}
	}
	if n != 0 {
		_ = o.create(ctx, o.name(n, endedSuffix)) // without it, the next process asks
	}
}
