package sim

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/epochkv/epochkv/internal/mvcc"
)

// Session is one client of a system under test.
type Session interface {
	// Begin opens a transaction; it rolls back one that is open.
	Begin(level Level) error
	// Get is the value of a key, empty if it is missing.
	Get(key string) (string, error)
	// Set sets a key in the transaction.
	Set(key, value string) error
	// Append appends to a key in the transaction, in one step.
	Append(key, suffix string) error
	// Scan is what the keys that begin with prefix hold.
	Scan(prefix string) (map[string]string, error)
	// Commit ends the transaction. ErrConflict means that it was rolled back, ErrInDoubt that its
	// outcome is unknown.
	Commit() error
	Close()
}

// How a commit may fail. Any other error means that the transaction was rolled back.
var (
	ErrConflict = errors.New("sim: conflict")
	ErrInDoubt  = errors.New("sim: the answer to the commit was lost")
)

// Run executes a transaction's steps, records what they saw, and returns how it ended.
func Run(h *History, s Session, client int, level Level, ops []Op) (*Txn, error) {
	t := &Txn{Client: client, Ops: ops, Call: h.Now()}
	err := s.Begin(level)
	for i := range ops {
		if err != nil {
			break
		}
		err = do(s, &ops[i])
		waitBriefly(i + client + ops[i].Number)
	}
	if err == nil {
		err = s.Commit()
		switch {
		case err == nil:
			t.Status = Committed
		case errors.Is(err, ErrInDoubt):
			t.Status = Unknown
		}
	}
	t.Return = h.Now()
	h.Add(t)
	return t, err
}

// waitBriefly lets other clients run between two steps: on a fast machine with few processors
// transactions would otherwise hardly overlap.
func waitBriefly(n int) {
	runtime.Gosched()
	if n%4 == 0 {
		time.Sleep(20 * time.Microsecond)
	}
}

// do does one step. Half of the appends read and write; the other half let the store do both.
func do(s Session, o *Op) error {
	switch o.Kind {
	case Read:
		text, err := s.Get(o.Key)
		if err != nil {
			return err
		}
		o.List, err = splitList(text)
		return err
	case Scan:
		all, err := s.Scan(o.Key)
		if err != nil {
			return err
		}
		o.Lists = map[string][]int{}
		for key, text := range all {
			if o.Lists[key], err = splitList(text); err != nil {
				return err
			}
		}
		return nil
	}
	suffix := strconv.Itoa(o.Number) + ","
	if o.Number%2 == 0 {
		return s.Append(o.Key, suffix)
	}
	text, err := s.Get(o.Key)
	if err != nil {
		return err
	}
	return s.Set(o.Key, text+suffix)
}

func splitList(text string) ([]int, error) {
	var list []int
	for part := range strings.SplitSeq(strings.TrimSuffix(text, ","), ",") {
		if text == "" {
			break
		}
		n, err := strconv.Atoi(part)
		if err != nil {
			return nil, fmt.Errorf("sim: %q is not a list: %w", text, err)
		}
		list = append(list, n)
	}
	return list, nil
}

// StoreSession is a session of a store in this process.
type StoreSession struct {
	store   *mvcc.Store
	session *mvcc.Session
	txn     *mvcc.Txn
}

// NewStoreSession opens a session.
func NewStoreSession(store *mvcc.Store) (*StoreSession, error) {
	session, err := store.Session()
	return &StoreSession{store: store, session: session}, err
}

// Begin implements Session.
func (s *StoreSession) Begin(level Level) (err error) {
	o := mvcc.TxnOptions{Isolation: mvcc.IsolationSerializable, Durability: mvcc.DurabilitySync}
	if level == Snapshot {
		o.Isolation = mvcc.IsolationSnapshot
	}
	s.txn, err = s.session.Begin(o)
	return err
}

// Get implements Session.
func (s *StoreSession) Get(key string) (string, error) {
	v, err := s.txn.Get(nil, []byte(key))
	return string(v.Data), err
}

// Set implements Session.
func (s *StoreSession) Set(key, value string) error { return s.txn.Set([]byte(key), []byte(value)) }

// Append implements Session.
func (s *StoreSession) Append(key, suffix string) error {
	_, err := s.txn.Invoke(&mvcc.Invoke{Kind: mvcc.InvokeAppend, Key: []byte(key), Operand: []byte(suffix)})
	return err
}

// Scan implements Session.
func (s *StoreSession) Scan(prefix string) (map[string]string, error) {
	upper := []byte(prefix)
	upper[len(upper)-1]++
	c, err := s.txn.Scan(mvcc.ScanOptions{Lower: []byte(prefix), Upper: upper})
	if err != nil {
		return nil, err
	}
	defer c.Close()
	all := map[string]string{}
	for c.Next() {
		all[string(c.Key())] = string(c.Value())
	}
	return all, c.Err()
}

// Commit implements Session. What was read counts only once it is durable, as it would before a
// server answers.
func (s *StoreSession) Commit() error {
	at, await := s.txn.At(), s.txn.Await()
	epoch, err := s.txn.Commit(context.Background())
	var conflict *mvcc.ConflictError
	switch {
	case errors.As(err, &conflict):
		return fmt.Errorf("%w: %w", ErrConflict, err)
	case err != nil:
		return err
	case epoch == at: // it only read
		return s.store.AwaitDurable(context.Background(), await)
	}
	if err := s.store.Wait(context.Background(), epoch, mvcc.DurabilitySync); err != nil {
		return fmt.Errorf("%w: %w", ErrInDoubt, err)
	}
	return nil
}

// Close implements Session.
func (s *StoreSession) Close() { s.session.Close() }
