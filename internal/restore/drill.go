package restore

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// scratchPattern is the name of the directory of a drill. A drill that is killed leaves it.
const scratchPattern = "epochkv-drill-*"

// Drill restores a state into a new directory below Options.Dir, which must exist, opens and verifies it as any restore does, and removes
// it, whether that was successful or not. It proves that the archive leads to a store; nothing else is written but the lease of a restore.
func Drill(ctx context.Context, o Options) (r *Report, err error) {
	if o.PlanOnly {
		return nil, errors.New("restore: a drill without a restore proves nothing")
	}
	scratch, err := os.MkdirTemp(o.Dir, scratchPattern)
	if err != nil {
		return nil, fmt.Errorf("restore: make the directory of the drill: %w", err)
	}
	defer func() {
		if removed := os.RemoveAll(scratch); removed != nil {
			err = errors.Join(err, fmt.Errorf("restore: remove the directory of the drill: %w", removed))
		}
	}()
	o.Dir = filepath.Join(scratch, "store")
	return Run(ctx, o)
}
