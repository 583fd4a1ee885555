package server

import (
	"cmp"
	"context"
	"errors"
	"io"
	"time"

	"google.golang.org/grpc"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/telemetry"
)

// BulkLoad implements KV.
func (s *kvService) BulkLoad(stream grpc.ClientStreamingServer[pb.BulkLoadRequest, pb.BulkLoadResponse]) error {
	return s.serveStream(stream.Context(), telemetry.MethodBulkLoad, func(conn *connection) error {
		if err := s.admit(stream.Context(), conn, kindWrite, shareSmallWrites, 0); err != nil {
			return err
		}
		defer s.admission.leave(conn, shareSmallWrites, 0)
		o := s.openSnapshot(stream.Context(), pb.SnapshotInfo_KIND_BULK_LOAD, s.store.Visible(), nil)
		defer o.close()
		ctx, cancel := s.untilDrain(o.ctx)
		defer cancel()
		var began time.Duration
		loaded, err := s.bulkLoad(ctx, o, stream, &began)
		if unknown := (*mvcc.OutcomeUnknownError)(nil); errors.As(err, &unknown) {
			return err // whatever else has ended it
		}
		if err != nil {
			return o.reason(s.drainError(err))
		}
		err = stream.SendAndClose(&pb.BulkLoadResponse{Epoch: uint64(loaded.Epoch), Keys: loaded.Keys})
		return s.bulkLoaded(&loaded, began, err)
	})
}

// bulkLoaded is the end of a bulk load, with the times of its commit. What it has loaded becomes durable while other commits pause.
func (s *kvService) bulkLoaded(l *mvcc.BulkLoaded, began time.Duration, err error) error {
	end := &streamEndError{err: err, epoch: uint64(l.Epoch), times: commitTimes{began: began}}
	if l.CommitPause > 0 {
		end.times.syncing = l.PausedAt.Sub(s.clock.started)
		end.times.done = end.times.syncing + l.CommitPause
	}
	return end
}

// errNotCommitted is the error of a bulk load whose stream ended without a commit.
var errNotCommitted = invalid("commit", "the stream ended without it; nothing was loaded")

// bulkLoad receives the stream's entries and commits them. It removes everything of a bulk load
// that was not committed, however the stream ends. began is when the commit begins.
func (s *kvService) bulkLoad(
	ctx context.Context, o *openSnapshot, stream grpc.ClientStreamingServer[pb.BulkLoadRequest, pb.BulkLoadResponse], began *time.Duration,
) (loaded mvcc.BulkLoaded, err error) {
	l, err := s.store.BeginBulkLoad()
	if err != nil {
		return mvcc.BulkLoaded{}, err
	}
	defer func() {
		// A file that cannot be removed takes space until the next start, and does not make the
		// load fail.
		if failed := l.Close(); failed != nil {
			s.log.Warn("removing the temporary files of a bulk load", "cause", failed)
		}
	}()
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	context.AfterFunc(ctx, l.Cancel)
	permitted := newBulkAccess(stream.Context(), s.Server) // before the first message is checked: what changes later is checked again
	messages := s.receiveBulk(ctx, stream)
	for {
		var m bulkMessage
		o.wait()
		select {
		case m = <-messages:
		case <-ctx.Done():
			return mvcc.BulkLoaded{}, context.Cause(ctx)
		}
		if err := o.resume(); err != nil {
			return mvcc.BulkLoaded{}, err
		}
		if errors.Is(m.err, io.EOF) {
			return mvcc.BulkLoaded{}, errNotCommitted
		}
		if m.err != nil {
			return mvcc.BulkLoaded{}, m.err
		}
		for _, e := range m.Entries {
			permitted.note(e.Key)
			if err := l.Add(e.Key, e.Value); err != nil {
				return mvcc.BulkLoaded{}, cmp.Or(context.Cause(ctx), err)
			}
		}
		commit := m.Commit
		if m.added == nil {
			m.ReturnToVTPool()
		} else {
			m.Reset() // which goroutines may refer to for longer
			close(m.added)
		}
		if commit {
			if err := permitted.commit(); err != nil {
				return mvcc.BulkLoaded{}, err
			}
			l.Permit(permitted.commit)
			*began = s.clock.now()
			return commitBulk(ctx, l)
		}
	}
}

// commitBulk commits a bulk load. If the store fails meanwhile, a restart may find the bulk load.
func commitBulk(ctx context.Context, l *mvcc.BulkLoad) (mvcc.BulkLoaded, error) {
	loaded, err := l.Commit(ctx)
	if loaded.Epoch != 0 && errors.Is(err, mvcc.ErrFailed) {
		err = &mvcc.OutcomeUnknownError{Epoch: loaded.Epoch, Cause: err}
	}
	return loaded, err
}

// bulkMessage is a message of a bulk load, or the error of receiving.
type bulkMessage struct {
	*pb.BulkLoadRequest
	most, size int // bytes of its encoding
	err        error
	added      chan struct{} // of a large message: the caller closes it when the entries are added
}

// UnmarshalVT is called by the codec for a received message. One that is too large is not decoded, and fails only once it is received: an error of the
// codec would end the stream without its reason.
func (m *bulkMessage) UnmarshalVT(data []byte) error {
	if m.size = len(data); m.size > m.most {
		m.err = &mvcc.LimitError{What: "batch bytes", Limit: m.most, Got: m.size}
		return nil
	}
	return m.BulkLoadRequest.UnmarshalVT(data)
}

// receiveBulk receives in a goroutine of its own, so that a drain does not wait for the client's
// next message. It ends with ctx and the stream. After a large message it receives no more until that is added: there is one in memory.
func (s *kvService) receiveBulk(
	ctx context.Context, stream grpc.ClientStreamingServer[pb.BulkLoadRequest, pb.BulkLoadResponse],
) <-chan bulkMessage {
	messages := make(chan bulkMessage, 1)
	s.drain.receivers.Go(func() {
		for {
			m := bulkMessage{BulkLoadRequest: pb.BulkLoadRequestFromVTPool(), most: bulkMessageMax(&s.config)}
			if err := stream.RecvMsg(&m); err != nil {
				m.err = err
			}
			if m.size >= receivedBytesMin {
				m.added = make(chan struct{})
			}
			select {
			case messages <- m:
			case <-ctx.Done():
				return
			}
			if m.err != nil {
				return
			}
			if m.added == nil {
				continue
			}
			select {
			case <-m.added:
				messageDropped(ctx)
			case <-ctx.Done():
				return
			}
		}
	})
	return messages
}
