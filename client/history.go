package client

import (
	"context"
	"iter"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// Moment names a state of the store: by its epoch, or by a time of the server's clock. What the zero Moment is depends on where
// it is given.
type Moment struct {
	Epoch Epoch
	Time  time.Time // instead of Epoch
}

func (m Moment) wire() (epoch, timeUs uint64) {
	if !m.Time.IsZero() {
		return 0, wireTime(m.Time)
	}
	return uint64(m.Epoch), 0
}

// wireTime is a time as requests have it. Times before 1970, and its first moment, which would be no time, become the earliest that there is.
func wireTime(t time.Time) uint64 { return uint64(max(t.UnixMicro(), 1)) }

// microTime is a time of the wire; zero is unknown.
func microTime(us uint64) time.Time {
	if us == 0 {
		return time.Time{}
	}
	return time.UnixMicro(int64(us))
}

// CommitOrigin says what made a commit.
type CommitOrigin = kvpb.CommitOrigin

// HistoryOptions bound a history. The zero HistoryOptions is all of it.
type HistoryOptions struct {
	// From: the versions that were written after it. The zero Moment is as far back as the server
	// keeps every version, with the version that each key had then.
	From Moment
	// To: the versions up to it; zero is now.
	To Moment
	// KeysOnly leaves the values out.
	KeysOnly bool
}

// KeyVersion is what one commit wrote of a key.
type KeyVersion struct {
	Key   []byte
	Epoch Epoch
	// Deleted says that the commit deleted the key. Otherwise it has set it to Value.
	Deleted   bool
	Value     []byte
	ExpiresAt time.Time
	// Time of the commit, if Origin is set. Otherwise the server's log does not have the commit any
	// more, and the commit was not later than Time; zero if that is not known either.
	Time   time.Time
	Origin CommitOrigin
}

// History iterates over the versions that a key had, newest first. An error ends the iteration: if it has reason SNAPSHOT_GONE,
// the server does not keep what was before, or has dropped it during the iteration; TakeHold prevents that.
func (c *Client) History(ctx context.Context, key []byte, o HistoryOptions) iter.Seq2[KeyVersion, error] {
	return c.history(ctx, &kvpb.HistoryRequest{Key: key}, o)
}

// HistoryOf is History of all keys of a range, in key order.
func (c *Client) HistoryOf(ctx context.Context, r Range, o HistoryOptions) iter.Seq2[KeyVersion, error] {
	return c.history(ctx, &kvpb.HistoryRequest{Range: r.wire()}, o)
}

func (c *Client) history(ctx context.Context, request *kvpb.HistoryRequest, o HistoryOptions) iter.Seq2[KeyVersion, error] {
	request.KeysOnly = o.KeysOnly
	request.FromEpoch, request.FromTimeUs = o.From.wire()
	request.ToEpoch, request.ToTimeUs = o.To.wire()
	return paged(func(token []byte) ([]*kvpb.KeyVersion, []byte, error) {
		request.ResumeToken = token
		response, err := call(ctx, c, safe, c.feed.History, request)
		return response.GetVersions(), response.GetResumeToken(), err
	}, keyVersion)
}

// paged iterates over the parts of an answer that comes in several. Each is asked for with the token of the one before; nil is
// that of the first, and of the last there is none.
func paged[Message, Part any](next func(token []byte) ([]Message, []byte, error), part func(Message) Part) iter.Seq2[Part, error] {
	return func(yield func(Part, error) bool) {
		for token := []byte(nil); ; {
			messages, following, err := next(token)
			if err != nil {
				var none Part
				yield(none, err)
				return
			}
			for _, m := range messages {
				if !yield(part(m), nil) {
					return
				}
			}
			if token = following; len(token) == 0 {
				return
			}
		}
	}
}

func keyVersion(v *kvpb.KeyVersion) KeyVersion {
	return KeyVersion{
		Key: v.GetKey(), Epoch: Epoch(v.GetEpoch()), Deleted: v.GetKind() == EventDelete, Value: v.GetValue(),
		ExpiresAt: expiresAt(v.GetExpiresAtMs()), Time: microTime(v.GetTimeUs()), Origin: v.GetOrigin(),
	}
}

// KeyState is what a key has in a state of the store.
type KeyState struct {
	// Epoch of the commit that wrote the value; zero if the key does not exist.
	Epoch     Epoch
	Value     []byte
	ExpiresAt time.Time
}

// Exists reports whether the key exists.
func (s *KeyState) Exists() bool { return s.Epoch != 0 }

// KeyChange is a key that differs between two states.
type KeyChange struct {
	Key      []byte
	Old, New KeyState
}

// DiffOptions change a comparison.
type DiffOptions struct {
	// To is the second state; zero is now.
	To Moment
	// KeysOnly leaves the values out.
	KeysOnly bool
}

// Diff iterates over the keys of a range that differ between the state at from and a later one, in key order: keys that exist in
// one of them only, and those that were written between them, perhaps with the same value. An error ends the iteration.
func (c *Client) Diff(ctx context.Context, r Range, from Moment, o DiffOptions) iter.Seq2[KeyChange, error] {
	request := &kvpb.DiffRequest{Range: r.wire(), KeysOnly: o.KeysOnly}
	request.FromEpoch, request.FromTimeUs = from.wire()
	request.ToEpoch, request.ToTimeUs = o.To.wire()
	return paged(func(token []byte) ([]*kvpb.KeyChange, []byte, error) {
		request.ResumeToken = token
		response, err := call(ctx, c, safe, c.feed.Diff, request)
		return response.GetChanges(), response.GetResumeToken(), err
	}, keyChange)
}

func keyChange(k *kvpb.KeyChange) KeyChange {
	return KeyChange{Key: k.GetKey(), Old: keyState(k.GetOld()), New: keyState(k.GetNew())}
}

func keyState(s *kvpb.KeyState) KeyState {
	return KeyState{Epoch: Epoch(s.GetEpoch()), Value: s.GetValue(), ExpiresAt: expiresAt(s.GetExpiresAtMs())}
}

// Hold keeps all versions from an epoch on until a deadline, whatever the retention, across restarts of the server.
type Hold struct {
	ID    uint64
	Owner string
	Epoch Epoch
	// Deadline by the server's clock.
	Deadline time.Time
}

func holdOf(h *kvpb.Hold) Hold {
	return Hold{ID: h.GetId(), Owner: h.GetOwner(), Epoch: Epoch(h.GetEpoch()), Deadline: time.UnixMilli(int64(h.GetDeadlineMs()))}
}

// Holds lists the holds of all clients, the oldest first.
func (c *Client) Holds(ctx context.Context) ([]Hold, error) {
	response, err := call(ctx, c, safe, c.admin.ListHolds, &kvpb.ListHoldsRequest{})
	if err != nil {
		return nil, err
	}
	list := make([]Hold, len(response.GetHolds()))
	for i, h := range response.GetHolds() {
		list[i] = holdOf(h)
	}
	return list, nil
}

// TakeHold makes a hold from a state on, the newest for the zero Moment, for a time from now: one second to 30 days. The owner
// is what operators see. If the outcome is unknown, the hold may exist until its deadline.
func (c *Client) TakeHold(ctx context.Context, owner string, at Moment, ttl time.Duration) (Hold, error) {
	request := &kvpb.TakeHoldRequest{Owner: owner, Ttl: durationpb.New(ttl)}
	request.Epoch, request.TimeUs = at.wire()
	response, err := call(ctx, c, !safe, c.admin.TakeHold, request)
	return holdOf(response.GetHold()), err
}

// RenewHold moves the deadline of a hold. An earlier deadline than before is not taken.
func (c *Client) RenewHold(ctx context.Context, id uint64, ttl time.Duration) (Hold, error) {
	response, err := call(ctx, c, safe, c.admin.TakeHold, &kvpb.TakeHoldRequest{Id: id, Ttl: durationpb.New(ttl)})
	return holdOf(response.GetHold()), err
}

// EndHold ends a hold before its deadline.
func (c *Client) EndHold(ctx context.Context, id uint64) error {
	_, err := call(ctx, c, !safe, c.admin.EndHold, &kvpb.EndHoldRequest{Id: id})
	return err
}
