package main

import (
	"bufio"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/epochkv/epochkv/internal/storage/inspect"
)

// errDeclined ends a command that its user did not confirm.
var errDeclined = errors.New("nothing was changed")

func (a *app) repairLogCommand() *cobra.Command {
	var dataDir string
	var yes bool
	cmd := &cobra.Command{
		Use:   "repair-log --data-dir DIR",
		Short: "Truncate a damaged log so that the server can start; loses commits",
		Long: `Truncate the log of a server that is not running at the first record that cannot be read, and remove all later records. All commits
from there on that the data file does not have are lost, also acknowledged ones. Those that it has stay; but the log does not have them any more, so that watches
which come back before them are told of a gap, and the archive has one. If there is a backup, restore it instead. Make a copy of the data directory before in any case.

An incomplete record at the end of the log is no damage and needs no repair: the server truncates it at its start.`,
		Example: `  kvctl verify --data-dir /var/lib/epochkv
  cp -a /var/lib/epochkv /var/lib/epochkv.copy
  kvctl repair-log --data-dir /var/lib/epochkv`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			if dataDir == "" {
				return usageError{errors.New("repair-log: give --data-dir")}
			}
			if !yes && !a.confirm("Every commit after the damage that the data file does not have will be lost. Continue? [y/N] ") {
				return errDeclined
			}
			return a.repairLog(dataDir)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&dataDir, "data-dir", "", "repair the log in this `DIR`; no server may run on it")
	flags.BoolVar(&yes, "yes", false, "do not ask")
	return cmd
}

// confirm asks a question on standard error; only "y" or "yes" is yes.
func (a *app) confirm(question string) bool {
	_, _ = fmt.Fprint(a.err, question)
	answer, err := bufio.NewReader(a.in).ReadString('\n')
	if err != nil { // no answer is no
		_, _ = fmt.Fprintln(a.err)
	}
	answer = strings.ToLower(strings.TrimSpace(answer))
	return answer == "y" || answer == "yes"
}

// repairedLog is what a repair did as JSON shows it.
type repairedLog struct {
	Changed   bool     `json:"changed"`
	From      uint64   `json:"dropped_from_epoch,omitempty"`
	Bytes     int64    `json:"bytes,omitempty"`
	File      string   `json:"file,omitempty"`
	Offset    int64    `json:"offset,omitempty"`
	PartsUpTo uint64   `json:"parts_up_to_epoch,omitempty"`
	Removed   []string `json:"removed_files,omitempty"`
}

func repairedAsJSON(d inspect.RepairedLog) *repairedLog {
	r := &repairedLog{Changed: d.Cause != nil}
	if r.Changed {
		r.From, r.Bytes, r.File, r.Offset, r.PartsUpTo, r.Removed = uint64(d.From), d.Bytes, d.Cause.File, d.Cause.Offset, uint64(d.Parts), d.Files
	}
	return r
}

func (a *app) repairLog(dir string) error {
	dropped, err := inspect.RepairLog(nil, dir)
	if err != nil {
		return err
	}
	return a.printRepaired(dropped)
}

func (a *app) printRepaired(dropped inspect.RepairedLog) error {
	if format := a.formatOr(formatTable); printsJSON(format) {
		return a.printJSON(format, repairedAsJSON(dropped))
	}
	if dropped.Cause == nil {
		return a.print("the log is sound; nothing was changed\n")
	}
	if err := a.print("dropped every epoch from %d on: %s cut from %s, which was damaged at offset %d\n",
		dropped.From, size(uint64(dropped.Bytes)), dropped.Cause.File, dropped.Cause.Offset); err != nil {
		return err
	}
	if first := dropped.Cause.Epoch; first < dropped.From {
		if err := a.print("the data file has the commits of epochs %d to %d: they stay, but watches and the archive do not find them in the log any more\n",
			first, dropped.From-1); err != nil {
			return err
		}
	}
	if dropped.Parts != 0 {
		if err := a.print("the data file holds parts of the dropped commits of epochs %d to %d, because a merge in steps was interrupted; these parts stay\n",
			dropped.From, dropped.Parts); err != nil {
			return err
		}
	}
	for _, name := range dropped.Files {
		if err := a.print("removed %s\n", name); err != nil {
			return err
		}
	}
	return nil
}
