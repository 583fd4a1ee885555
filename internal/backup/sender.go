package backup

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"

	"github.com/epochkv/epochkv/internal/objectstore"
)

// sender sends parts in a goroutine of its own, so that pages are read meanwhile. It holds one part, and another one waits: the
// job has three parts in memory at most.
type sender struct {
	ctx    context.Context // of the sending; ends with an error of it
	cancel context.CancelCauseFunc
	job    *job
	parts  chan *finishedPart
	done   chan struct{}
	err    error // read after done
}

// errSendingFailed is what the reader of pages gets; the sender has the reason.
var errSendingFailed = errors.New("backup: sending failed")

func newSender(ctx context.Context, j *job) *sender {
	ctx, cancel := context.WithCancelCause(ctx)
	s := &sender{ctx: ctx, cancel: cancel, job: j, parts: make(chan *finishedPart), done: make(chan struct{})}
	go s.run()
	return s
}

func (s *sender) run() {
	defer close(s.done)
	for part := range s.parts {
		if s.err = s.store(part); s.err != nil {
			s.cancel(errSendingFailed)
			return
		}
	}
}

// send passes a part on, in order. It waits while another one waits.
func (s *sender) send(part *finishedPart) error {
	switch part.kind {
	case partPages:
		s.job.manifest.Parts = append(s.job.manifest.Parts, part.info)
	case partTable:
		s.job.manifest.Table = append(s.job.manifest.Table, part.info)
	case partFile:
		s.job.manifest.Quarantine = &Quarantine{SHA256: part.info.SHA256, Bytes: part.info.Bytes, File: s.job.state.Quarantine.Number}
	}
	select {
	case s.parts <- part:
		return nil
	case <-s.done:
		return errSendingFailed
	case <-s.ctx.Done():
		return context.Cause(s.ctx)
	}
}

// close waits until everything is stored.
func (s *sender) close() error {
	close(s.parts)
	<-s.done
	s.cancel(nil)
	return s.err
}

// store stores a part, unless the target has it.
func (s *sender) store(part *finishedPart) error {
	j, stored := s.job, object{part.info.SHA256, part.info.Bytes}
	has, err := hasPart(s.ctx, j.store, j.dir, stored)
	if err == nil && has && j.readsParts() {
		has, err = j.isIntact(s.ctx, &part.info)
	}
	if err != nil {
		return err
	}
	if !has {
		err = j.store.Create(s.ctx, partName(j.dir, part.info.SHA256), &partContent{part, func() { _ = j.pin.Renew() }}) // the reader of pages finds out
		if err == nil {
			j.sent.Add(1)
			j.bytesSent.Add(uint64(part.info.Bytes))
			return nil
		}
		if !errors.Is(err, objectstore.ErrExists) {
			return err
		}
	}
	j.kept.Add(1)
	j.keptParts = append(j.keptParts, stored)
	return nil
}

// readsParts reports whether parts that exist are read. A store of objects has checksums of its own, and returns no damaged object; a file in a
// directory may be anything.
func (j *job) readsParts() bool {
	_, isDir := objectstore.DirectoryOf(j.store)
	return j.options.ReadAll || isDir
}

// isIntact reads a part that exists. A damaged one is deleted, so that it is sent again: otherwise each later backup of the same pages would have
// it, and no backup that is made could be restored. The backups that name it are mended as well.
func (j *job) isIntact(ctx context.Context, part *Part) (bool, error) {
	name := partName(j.dir, part.SHA256)
	r, err := (&renewing{j.store, j.pin}).Read(ctx, name, 0, -1)
	if errors.Is(err, objectstore.ErrNotFound) {
		return false, nil
	}
	h, n := sha256.New(), int64(0)
	if err == nil {
		n, err = io.Copy(h, io.LimitReader(r, part.Bytes+1))
		err = errors.Join(err, r.Close())
	}
	switch {
	case err != nil && !errors.Is(err, objectstore.ErrUnreadable):
		return false, err
	case err == nil && n == part.Bytes && hex.EncodeToString(h.Sum(nil)) == part.SHA256:
		return true, nil
	}
	return false, j.store.Delete(ctx, name)
}

// hasPart reports whether a target has a part. One that is too short was written by a target that breaks its promises; it is
// deleted.
func hasPart(ctx context.Context, store objectstore.Store, dir string, part object) (bool, error) {
	name := partName(dir, part.SHA256)
	r, err := store.Read(ctx, name, part.Bytes, 0)
	switch {
	case err == nil:
		return true, r.Close()
	case errors.Is(err, objectstore.ErrNotFound):
		return false, nil
	case errors.Is(err, objectstore.ErrShort):
		return false, store.Delete(ctx, name)
	}
	return false, err
}
