package restore

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
)

// Drill restores a state into a new directory below Options.Dir, which must exist, opens and verifies it as any restore does, and removes
// it, whether that was successful or not. First it removes what killed drills have left there. It proves that the archive leads to a store,
// and with Options.Contents that the store has what the original has. It fails if the newest backup is damaged, although a restore would take
// the one before it. Nothing else is written but the lease of a restore.
func Drill(ctx context.Context, o Options) (r *Report, err error) {
	if o.PlanOnly {
		return nil, errors.New("restore: a drill without a restore proves nothing")
	}
	if _, err := RemoveLeftovers(o.Dir); err != nil {
		return nil, err
	}
	s, err := newScratch(o.Dir)
	if err != nil {
		return nil, fmt.Errorf("restore: make the directory of the drill: %w", err)
	}
	defer func() {
		if removed := s.remove(); removed != nil {
			err = errors.Join(err, fmt.Errorf("restore: remove the directory of the drill: %w", removed))
		}
	}()
	o.Dir, o.NewestBase = filepath.Join(s.dir, "store"), true
	return Run(ctx, o)
}
