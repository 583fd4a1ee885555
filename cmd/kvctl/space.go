package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
)

func (a *app) spaceCommand() *cobra.Command {
	var f struct {
		byPrefix  bool
		depth     uint32
		delimiter string
		rate      uint32
	}
	cmd := &cobra.Command{
		Use:   "space",
		Short: "Show how the space of the data file is used",
		Long: `Show how the data file is used: live pages, pending pages (freed, but a reader may still use them), free pages, and live pages by kind.
With --by-prefix the command reads the whole tree and adds up the keys and bytes of each prefix, exactly, as of the newest checkpoint.
Pages that cannot be read are listed with the range of keys that they may contain. The sums do not include these keys, and the exit code is 8.`,
		Example: `  kvctl space
  kvctl space --by-prefix --depth 2
  kvctl space --by-prefix --delimiter : -o json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !f.byPrefix && (cmd.Flags().Changed("depth") || cmd.Flags().Changed("delimiter")) {
				return usageError{errors.New("--depth and --delimiter need --by-prefix")}
			}
			delimiter, err := a.bytesArg(f.delimiter)
			if err != nil {
				return err
			}
			ctx, cancel := a.longRunning(cmd)
			defer cancel()
			return a.withClient(func(c *client.Client) error {
				space, err := c.Space(ctx, &kvpb.SpaceRequest{
					ByPrefix: f.byPrefix, Depth: f.depth, Delimiter: delimiter, PagesPerSecond: f.rate,
				})
				if err != nil {
					return err
				}
				return a.tellSpace(space, f.byPrefix)
			})
		},
	}
	flags := cmd.Flags()
	flags.BoolVar(&f.byPrefix, "by-prefix", false, "read the tree and sum up by prefix")
	flags.Uint32Var(&f.depth, "depth", 1, "`N` parts of a key make a prefix")
	flags.StringVar(&f.delimiter, "delimiter", "/", "`TEXT` that ends a part of a key; hexadecimal with --hex")
	flags.Uint32Var(&f.rate, "pages-per-second", 0, "read at most `PAGES_PER_SECOND` (default: as fast as it goes)")
	return cmd
}

// printMessage prints a message as JSON.
func (a *app) printMessage(format string, m proto.Message) error {
	text, err := appendMessageJSON(nil, m.ProtoReflect(), a.hex)
	if err != nil {
		return err
	}
	return a.printJSON(format, json.RawMessage(text))
}

// tellSpace prints the answer; sums that lack something end in errDamaged.
func (a *app) tellSpace(s *kvpb.SpaceResponse, byPrefix bool) (err error) {
	if format := a.formatOr(formatTable); format != formatTable {
		err = a.printMessage(format, s)
	} else {
		err = a.printSpace(s, byPrefix)
	}
	if n := s.GetUnreadableTotal(); err == nil && n > 0 {
		err = fmt.Errorf("%w in %d places: the sums are incomplete", errDamaged, n)
	}
	return err
}

func (a *app) printSpace(s *kvpb.SpaceResponse, byPrefix bool) error {
	if err := writeRows(a.out, spaceRows(s), make([]int, 2)); err != nil || !byPrefix {
		return err
	}
	rows := [][]string{{"PREFIX", "KEYS", "BYTES"}}
	for _, p := range s.GetPrefixes() {
		prefix := a.cell(p.GetPrefix())
		if len(p.GetPrefix()) == 0 {
			prefix = "(no prefix)"
		}
		rows = append(rows, []string{prefix, strconv.FormatUint(p.GetKeys(), 10), size(p.GetBytes())})
	}
	if other := s.GetOtherPrefixes(); other.GetKeys() > 0 {
		rows = append(rows, []string{"(all others)", strconv.FormatUint(other.GetKeys(), 10), size(other.GetBytes())})
	}
	if err := a.print("\n"); err != nil {
		return err
	}
	return writeRows(a.out, rows, make([]int, 3))
}

func spaceRows(s *kvpb.SpaceResponse) [][]string {
	var rows [][]string
	row := func(name, format string, args ...any) {
		rows = append(rows, []string{name, fmt.Sprintf(format, args...)})
	}
	kinds, page := s.GetPages(), uint64(s.GetPageBytes())
	row("file", "%s as of epoch %d: %s live, %s pending, %s free", size(s.GetFileBytes()), s.GetEpoch(),
		size(s.GetLiveBytes()), size(s.GetPendingBytes()), size(s.GetFreeBytes()))
	row("tree", "%s in %d levels, %d keys, %s of keys and values in leaves", size(kinds.GetTree()*page), s.GetTreeHeight(), s.GetKeys(),
		size(s.GetEntryBytes()))
	row("large values", "%d of %s, in %s packed (%.0f %% full) and %s of whole pages", s.GetValues(), size(s.GetValueBytes()),
		size(kinds.GetBlobs()*page), 100*s.GetBlobFill(), size(kinds.GetOverflow()*page))
	row("bookkeeping", "%s indirection table of large values, %s allocation map", size(kinds.GetIndirectionTable()*page), size(kinds.GetAllocationMap()*page))
	if s.GetLeafFill() > 0 {
		row("leaves", "%.0f %% full, %d versions", 100*s.GetLeafFill(), s.GetVersions())
	}
	for _, d := range s.GetUnreadable() {
		line := damageLineOf(d)
		row("INCOMPLETE", "%s", line.text())
	}
	return rows
}
