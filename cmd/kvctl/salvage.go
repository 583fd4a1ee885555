package main

import (
	"bufio"
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/epochkv/epochkv/client"
	"github.com/epochkv/epochkv/internal/storage/inspect"
)

func (a *app) salvageCommand() *cobra.Command {
	var dataDir, out string
	cmd := &cobra.Command{
		Use:   "salvage --data-dir DIR --out FILE",
		Short: "Write the readable keys of a damaged data directory to a file",
		Long: `Write the newest value of every key that can be read from the files of a server that is not running, as JSON Lines that import
understands. The data directory is not changed. Leaves below damaged pages are searched in the whole file. The log
is applied last. If keys are lost, their ranges are listed and the exit code is 8.

A key with a deadline keeps it. Leases and locks are not salvaged: lease_id in a line says that the key belonged to a lease, and import says
what becomes of it.

Until it is complete, the file is FILE.partial; after an interrupt or an error that has what was salvaged until then.

If no superblock is readable, or neither the allocation map nor an inner page, the output may contain deleted keys; a note says so.`,
		Example: `  kvctl salvage --data-dir /var/lib/epochkv --out rescued.jsonl
  kvctl import rescued.jsonl`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if dataDir == "" || out == "" {
				return usageError{errors.New("salvage: give --data-dir and --out")}
			}
			return a.salvage(cmd, dataDir, out)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&dataDir, "data-dir", "", "read the files in this `DIR`; no server may run on it")
	flags.StringVar(&out, "out", "", "write to this `FILE`, which must not exist")
	return cmd
}

func (a *app) salvage(cmd *cobra.Command, dir, out string) error {
	ctx, cancel := a.longRunning(cmd)
	defer cancel()
	if _, err := os.Lstat(out); err == nil {
		return fmt.Errorf("%s: %w", out, os.ErrExist)
	}
	partial := out + ".partial" // the file gets its name when it is complete: import does not see that one is not
	file, err := os.OpenFile(partial, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	buffered := bufio.NewWriterSize(file, 256<<10)
	sink := &jsonSink{w: buffered}
	progress := a.newProgress("salvaged", -1)
	report, err := inspect.Salvage(ctx, nil, dir, func(e *inspect.Salvaged) error {
		progress.add(1, len(e.Key)+len(e.Value))
		progress.advance(len(e.Key) + len(e.Value))
		return sink.write(&record{
			key: e.Key, value: e.Value, epoch: client.Epoch(e.Epoch), expiresAt: e.Metadata.ExpiresAt, lease: e.Metadata.Lease,
		})
	})
	if err = errors.Join(err, buffered.Flush(), file.Sync(), file.Close()); err == nil {
		err = os.Rename(partial, out)
	}
	switch {
	case err != nil && progress.records == 0:
		return errors.Join(err, os.Remove(partial))
	case err != nil:
		return leftoverError{fmt.Errorf("%s has what was salvaged until then: %w", partial, err)}
	}
	progress.finish()
	return a.printSalvage(report)
}

// salvageResult is what salvage prints as JSON. The names are part of the interface.
type salvageResult struct {
	Epoch     uint64       `json:"epoch"`
	Keys      uint64       `json:"keys"`
	Bytes     uint64       `json:"bytes"`
	FromTree  uint64       `json:"from_tree"`
	FromScan  uint64       `json:"from_scan"`
	FromLog   uint64       `json:"from_log"`
	Expiring  uint64       `json:"expiring"`
	Leased    uint64       `json:"leased"`
	LostTotal uint64       `json:"lost_total"`
	Lost      []damageLine `json:"lost,omitempty"`
	Notes     []string     `json:"notes,omitempty"`
}

func (a *app) printSalvage(r *inspect.SalvageReport) error {
	out := salvageResult{
		Epoch: uint64(r.Epoch), Keys: r.Keys, Bytes: r.Bytes, FromTree: r.FromTree, FromScan: r.FromScan, FromLog: r.FromLog, Expiring: r.Expiring, Leased: r.Leased,
		LostTotal: r.LostTotal, Lost: damageLines(r.Lost), Notes: r.Notes,
	}
	format := a.formatOr(formatTable)
	if format != formatTable {
		if err := a.printJSON(format, &out); err != nil {
			return err
		}
	} else if err := writeRows(a.out, out.rows(), make([]int, 2)); err != nil {
		return err
	}
	if out.LostTotal > 0 {
		return fmt.Errorf("%w: %d ranges, values or parts of the log are lost", errDamaged, out.LostTotal)
	}
	return nil
}

func (r *salvageResult) rows() [][]string {
	rows := [][]string{
		{"keys", fmt.Sprintf("%d, %s", r.Keys, size(r.Bytes))},
		{"found", fmt.Sprintf("%d through the tree, %d in a search of the file, %d in the log", r.FromTree, r.FromScan, r.FromLog)},
	}
	if r.Expiring > 0 {
		rows = append(rows, []string{"with a deadline", fmt.Sprintf("%d; import sets the deadlines again, and what is overdue is deleted then", r.Expiring)})
	}
	if r.Leased > 0 {
		rows = append(rows, []string{"with a lease", fmt.Sprintf("%d; leases and locks are not salvaged, see kvctl import --skip-leased", r.Leased)})
	}
	for _, note := range r.Notes {
		rows = append(rows, []string{"note", note})
	}
	for i := range r.Lost {
		rows = append(rows, []string{"LOST", r.Lost[i].text()})
	}
	return rows
}
