package archive

import (
	"context"
	"errors"
	"fmt"
	"io"
)

// checkTarget refuses an epoch of which the state does not exist: clients may have seen commits with it before they were durable, and a
// crash lost them, or a repair of the log removed them. The state before would be taken for it.
func (p *Plan) checkTarget(ctx context.Context) (err error) {
	n := len(p.files) - 1
	if p.Target.Epoch == 0 || n < 0 || p.Files[n].Last.Epoch == p.Target.Epoch {
		return nil
	}
	before := p.Base
	for i := range p.Files[:n] {
		before = p.Files[i].after(before)
	}
	r, err := p.place.open(ctx, p.files[n].name)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	for {
		rec, err := r.Next()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		case rec.Epoch <= before.Epoch:
			continue
		case rec.Skipped && before.Epoch < p.Target.Epoch && p.Target.Epoch < rec.Epoch:
			reason := fmt.Sprintf("a crash lost the commits from epoch %d on, or a repair of the log removed them; epoch %d is the same state as epoch %d", before.Epoch+1, rec.Epoch, before.Epoch)
			return &MissingError{Target: p.Target, From: before.Epoch + 1, Through: rec.Epoch - 1, Reason: reason, Latest: before}
		case rec.Epoch >= p.Target.Epoch:
			return nil
		}
		before = r.after(before, &rec)
	}
}
