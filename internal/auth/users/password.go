package users

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"encoding/base64"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/crypto/argon2"

	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/fairqueue"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// HashCost is what a password costs.
type HashCost struct {
	KiB     uint32
	Passes  uint32
	Threads uint8
}

// hashDefault takes 60 to 100 ms of one processor.
var hashDefault = HashCost{KiB: 64 << 10, Passes: 2, Threads: 1}

// hashMost bounds what a record can make a login cost.
var hashMost = HashCost{KiB: 256 << 10, Passes: 10, Threads: 4}

const (
	saltBytes = 16
	hashBytes = 32

	// hashersMax is how many goroutines hash: a flood of logins takes 128 MiB, and no more.
	hashersMax = 2
	// hashQueue is how many passwords wait: three to six seconds' worth.
	hashQueue = 64
)

// hashersOn is how many goroutines hash on so many processors: half of them at most, because every client may log in. Two on two processors left a
// tenth of their rate to the gets and puts of others.
func hashersOn(processors int) int { return min(max(processors/2, 1), hashersMax) }

// passwordHash is an argon2id hash in PHC form, taken apart: $argon2id$v=19$m=65536,t=2,p=1$SALT$HASH.
type passwordHash struct {
	cost       HashCost
	salt, hash []byte
}

func (p *passwordHash) String() string {
	b := base64.RawStdEncoding
	return fmt.Sprintf("$argon2id$v=%d$m=%d,t=%d,p=%d$%s$%s", argon2.Version, p.cost.KiB, p.cost.Passes, p.cost.Threads,
		b.EncodeToString(p.salt), b.EncodeToString(p.hash))
}

func parseHash(text string) (p passwordHash, err error) {
	parts := strings.Split(text, "$")
	if len(parts) != 6 || parts[0] != "" || parts[1] != "argon2id" || parts[2] != fmt.Sprintf("v=%d", argon2.Version) {
		return p, errMalformed
	}
	if _, err := fmt.Sscanf(parts[3], "m=%d,t=%d,p=%d", &p.cost.KiB, &p.cost.Passes, &p.cost.Threads); err != nil {
		return p, errMalformed
	}
	c := &p.cost
	if c.KiB == 0 || c.Passes == 0 || c.Threads == 0 || c.KiB > hashMost.KiB || c.Passes > hashMost.Passes || c.Threads > hashMost.Threads {
		return p, errMalformed
	}
	var err1, err2 error
	p.salt, err1 = base64.RawStdEncoding.DecodeString(parts[4])
	p.hash, err2 = base64.RawStdEncoding.DecodeString(parts[5])
	if err1 != nil || err2 != nil || len(p.salt) < 8 || len(p.hash) < 16 || len(p.salt) > 64 || len(p.hash) > 64 {
		return p, errMalformed
	}
	return p, nil
}

// compute is the hash of a password with the salt and the cost of p.
func (p *passwordHash) compute(password string) []byte {
	return argon2.IDKey([]byte(password), p.salt, p.cost.Passes, p.cost.KiB, p.cost.Threads, uint32(max(len(p.hash), hashBytes)))
}

func (p *passwordHash) matches(password string) bool {
	return subtle.ConstantTimeCompare(p.compute(password), p.hash) == 1
}

// hasher computes hashes outside of the goroutines of requests.
type hasher struct {
	count  int           // goroutines
	added  chan struct{} // wakes a goroutine; has room for all
	ended  chan struct{} // closed when nothing is hashed any more
	cost   HashCost
	dummy  passwordHash                 // that no password has
	client func(context.Context) string // whose a job is; empty if it is not known

	computed atomic.Uint64 // jobs that were executed
	busy     atomic.Int64  // jobs that are being executed
	ran      atomic.Int64  // nanoseconds from began to the end of the last one
	began    time.Time

	mu    sync.Mutex // a leaf
	queue fairqueue.Queue[string, *hashJob]
}

// hashJob is a password that waits, or is hashed.
type hashJob struct {
	ctx     context.Context
	execute func()
	done    chan error // has room for the outcome
}

func newHasher(cost HashCost) *hasher {
	h := &hasher{
		count: hashersOn(runtime.GOMAXPROCS(0)), added: make(chan struct{}, hashersMax), ended: make(chan struct{}),
		cost: cost, client: func(context.Context) string { return "" }, began: time.Now(),
	}
	h.dummy = passwordHash{cost: cost, salt: newSalt(), hash: make([]byte, hashBytes)}
	return h
}

// run hashes, and calls other beside, until ctx ends.
func (h *hasher) run(ctx context.Context, other func()) {
	defer close(h.ended)
	var running sync.WaitGroup
	for range h.count {
		running.Go(func() { h.work(ctx) })
	}
	other()
	running.Wait()
}

// work executes jobs until ctx ends.
func (h *hasher) work(ctx context.Context) {
	for ctx.Err() == nil {
		if j := h.take(); j != nil {
			h.busy.Add(1)
			h.computed.Add(1)
			j.execute()
			h.ran.Store(int64(time.Since(h.began)))
			h.busy.Add(-1)
			j.done <- nil
			continue
		}
		select {
		case <-h.added:
		case <-ctx.Done():
		}
	}
}

// take removes the job whose turn it is from the queue; nil if none waits. A job whose client has left takes no turn.
func (h *hasher) take() *hashJob {
	h.mu.Lock()
	defer h.mu.Unlock()
	for h.queue.Len() > 0 {
		next := h.queue.Next()
		if next.Value.ctx.Err() == nil {
			return h.queue.Pop()
		}
		h.queue.Remove(next)
	}
	return nil
}

// heapKept is how long the memory of a hash counts after it: others mostly follow.
const heapKept = time.Second

// heapBytes is what hashes take of the heap: of those that are computed, or were within heapKept.
func (h *hasher) heapBytes() int64 {
	if ran := time.Duration(h.ran.Load()); h.busy.Load() == 0 && (ran == 0 || time.Since(h.began)-ran > heapKept) {
		return 0
	}
	return int64(h.count) * int64(h.cost.KiB) << 10
}

// retryHash is the advice to a client whose password found a full queue.
const retryHash = time.Second

// do executes a job on a hasher's goroutine. A job whose client leaves before is not executed, and leaves the queue. After the end of run the error is
// mvcc.ErrClosed.
func (h *hasher) do(ctx context.Context, execute func()) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	j := &hashJob{ctx: ctx, execute: execute, done: make(chan error, 1)}
	place := h.join(h.client(ctx), j)
	if place == nil {
		return errHashQueue()
	}
	defer h.leave(place)
	select {
	case err := <-j.done:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-h.ended:
		return mvcc.ErrClosed
	}
}

// errHashQueue is the end of a job that has no place in the queue.
func errHashQueue() error {
	return &auth.LimitError{What: "passwords that wait to be checked", Limit: hashQueue, Retry: retryHash}
}

// hashPlace is that of a job in the queue.
type hashPlace = fairqueue.Place[string, *hashJob]

// join adds a job of a client to the queue. If all places are taken, the job gets that of the newest job of a client that has more of them than this
// client will have then; the other job is refused. So floods leave each client its part of the places, and while no other client needs them
// the logins of one have all: many users may share an address. Without such a job join returns nil.
func (h *hasher) join(client string, j *hashJob) *hashPlace {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.queue.Len() >= hashQueue {
		newest, most := h.queue.Longest()
		if h.queue.Of(client)+1 >= most {
			return nil
		}
		h.queue.Remove(newest)
		newest.Value.done <- errHashQueue()
	}
	place := h.queue.Push(client, j)
	select {
	case h.added <- struct{}{}:
	default: // all are woken
	}
	return place
}

// leave removes a job from the queue, if it still waits.
func (h *hasher) leave(place *hashPlace) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.queue.Remove(place)
}

func newSalt() []byte {
	salt := make([]byte, saltBytes)
	_, _ = rand.Read(salt) // it never fails
	return salt
}

// newHash checks and hashes a new password.
func (m *Manager) newHash(ctx context.Context, password string) (string, error) {
	if len(password) < PasswordBytesMin || len(password) > PasswordBytesMax {
		return "", &InvalidError{Field: "password", Text: fmt.Sprintf("must have %d to %d bytes", PasswordBytesMin, PasswordBytesMax)}
	}
	var text string
	if err := m.hasher.do(ctx, func() { text = hashPassword(m.hasher.cost, password) }); err != nil {
		return "", err
	}
	return text, nil
}

func hashPassword(cost HashCost, password string) string {
	p := passwordHash{cost: cost, salt: newSalt()}
	p.hash = p.compute(password)
	return p.String()
}

// Password authenticates a user by its password, in the time that a wrong one takes, too. The errors are
// auth.ErrUnauthenticated, *auth.LimitError, and why the context ended.
func (m *Manager) Password(ctx context.Context, name, password string) (auth.Identity, error) {
	if _, err := m.checkPassword(ctx, name, password); err != nil {
		return auth.Identity{}, err
	}
	return auth.Identity{User: name, Method: auth.MethodPassword}, nil
}

// checkPassword is Password. It returns the hash that the password has matched: a change that the password permits is made only if the user
// has that hash then, because a hash takes a while, and waits for others.
func (m *Manager) checkPassword(ctx context.Context, name, password string) (hash string, err error) {
	if len(name) > NameBytesMax || len(password) > PasswordBytesMax {
		return "", auth.ErrUnauthenticated
	}
	client := m.hasher.client(ctx)
	if err := m.attempts.begin(name, client); err != nil {
		return "", err
	}
	u, err := m.User(ctx, name)
	stored := m.hasher.dummy
	known := err == nil && u.HasPassword() && !u.Disabled
	if known {
		if p, err := parseHash(u.hash); err == nil {
			stored = p
		} else {
			known = false
		}
	}
	matches := false
	if err := m.hasher.do(ctx, func() { matches = stored.matches(password) }); err != nil {
		m.attempts.end(name, client, false) // the client has learnt nothing
		return "", err
	}
	m.attempts.end(name, client, !known || !matches)
	if !known || !matches {
		return "", auth.ErrUnauthenticated
	}
	return u.hash, nil
}

// stillHas refuses a change that a password has permitted, if the user has another one in the meantime, or is disabled.
func (d *draft) stillHas(name, hash string) error {
	if u := d.next.users[name]; u == nil || u.Disabled || u.hash != hash {
		return auth.ErrUnauthenticated
	}
	return nil
}

// Login authenticates a user by its password, and makes a session token.
func (m *Manager) Login(ctx context.Context, name, password, label string, lifetime time.Duration) (string, TokenInfo, error) {
	if lifetime == 0 {
		lifetime = TokenTimeDefault
	}
	if lifetime < time.Second || lifetime > TokenTimeMax {
		return "", TokenInfo{}, &InvalidError{Field: "lifetime", Text: fmt.Sprintf("must be from 1s to %v", TokenTimeMax)}
	}
	hash, err := m.checkPassword(ctx, name, password)
	if err != nil {
		return "", TokenInfo{}, err
	}
	return m.CreateToken(ctx, NewToken{User: name, Label: label, Expires: m.options.Now().Add(lifetime), session: true, hash: hash})
}

// Attempts with wrong passwords that a user has each minute, whether it exists or not: from one client, so that another that knows no more than a
// name does not keep the user out, and from all. And of how many names and clients they are counted, which is more than can be hashed in that time.
const (
	attemptsMax    = 10
	attemptsOfAll  = 100
	attemptsTime   = time.Minute
	attemptedNames = 10_000
)

// attempts counts the logins of each name with wrong passwords, and those under way, minute by minute. It has no name without any:
// requests that are refused before their password is hashed cost next to nothing, and must not use up what others need.
type attempts struct {
	elapsed func() time.Duration

	mu    sync.Mutex // a leaf
	since time.Duration
	count map[attempter]attemptCount
}

// attempter is a name with one of its clients, or with all.
type attempter struct {
	name, client string
	all          bool
}

// attemptersOf are those of which an attempt counts.
func attemptersOf(name, client string) [2]attempter {
	return [...]attempter{{name: name, client: client}, {name: name, all: true}}
}

// most is how many attempts may fail in a minute.
func (a *attempter) most() int {
	if a.all {
		return attemptsOfAll
	}
	return attemptsMax
}

type attemptCount struct{ failed, running int }

// begin counts an attempt, or refuses it. Those under way may fail, too: while they are too many, another one may come soon.
func (a *attempts) begin(name, client string) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := a.elapsed()
	if a.count == nil || now-a.since >= attemptsTime {
		a.count, a.since = map[attempter]attemptCount{}, now
	}
	for _, who := range attemptersOf(name, client) {
		most := who.most()
		n, known := a.count[who]
		if n.failed+n.running < most && (known || len(a.count) < attemptedNames) {
			continue
		}
		retry := attemptsTime - (now - a.since)
		if known && n.failed < most {
			retry = min(retry, retryHash)
		}
		return &auth.LimitError{What: "attempts to log in a minute", Limit: uint64(most), Retry: retry}
	}
	a.add(name, client, attemptCount{running: 1})
	return nil
}

// end ends an attempt that has failed; or it has succeeded, or was not compared with the password.
func (a *attempts) end(name, client string, failed bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	more := attemptCount{running: -1}
	if failed {
		more.failed = 1
	}
	a.add(name, client, more)
}

// add changes the counts. An attempt may end in the minute after the one in which it has begun.
func (a *attempts) add(name, client string, more attemptCount) {
	for _, who := range attemptersOf(name, client) {
		n := a.count[who]
		n.failed, n.running = n.failed+more.failed, max(n.running+more.running, 0)
		if n == (attemptCount{}) {
			delete(a.count, who)
		} else {
			a.count[who] = n
		}
	}
}
