package main

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"time"
	"unicode/utf8"

	"github.com/schollz/progressbar/v3"
	"github.com/spf13/cobra"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
	"github.com/epochkv/epochkv/internal/storage/inspect"
)

// errDamaged ends a verification or salvage that found damage and has said which.
var errDamaged = errors.New("stored data is damaged")

func (a *app) verifyCommand() *cobra.Command {
	var dataDir string
	var rate uint32
	cmd := &cobra.Command{
		Use:   "verify",
		Short: "Check every page, value and log record, of a server or of its files",
		Long: `Check everything that is stored: checksums, order and structure of the tree, every large value, that each page is in use, waiting or
free and nothing twice, the counters, and the log. The server goes on working meanwhile. With --data-dir the files of a
server that is not running are checked.

Damage is listed with the keys that it may hide, and the exit code is 8.`,
		Example: `  kvctl verify
  kvctl verify --pages-per-second 2000
  kvctl verify --data-dir /var/lib/epochkv -o json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel := a.longRunning(cmd)
			defer cancel()
			if dataDir != "" {
				return a.verifyFiles(ctx, dataDir, rate)
			}
			return a.withClient(func(c *client.Client) error { return a.verifyServer(ctx, c, rate) })
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&dataDir, "data-dir", "", "check the files in this `DIR`; no server may run on it")
	flags.Uint32Var(&rate, "pages-per-second", 0, "read at most `PAGES_PER_SECOND` (default: as fast as it goes)")
	return cmd
}

// pageBar shows progress in pages, to a person.
type pageBar struct {
	app  *app
	what string
	bar  *progressbar.ProgressBar
}

func (p *pageBar) at(done, total, damages uint64) {
	if !p.app.errTerminal {
		return
	}
	if p.bar == nil {
		p.bar = progressbar.NewOptions64(int64(total), progressbar.OptionSetWriter(p.app.err), progressbar.OptionSetDescription(p.what),
			progressbar.OptionShowCount(), progressbar.OptionSetItsString("pages"), progressbar.OptionClearOnFinish())
	}
	if damages > 0 {
		p.bar.Describe(fmt.Sprintf("%s, %d damages", p.what, damages))
	}
	p.bar.ChangeMax64(int64(max(total, done)))
	_ = p.bar.Set64(int64(done)) // a bar that cannot be drawn is no reason to end the work
}

func (p *pageBar) finish() {
	if p.bar != nil {
		_ = p.bar.Finish()
	}
}

func (a *app) verifyServer(ctx context.Context, c *client.Client, rate uint32) error {
	bar := &pageBar{app: a, what: "verifying"}
	r, err := c.Verify(ctx, rate, func(p *kvpb.VerifyProgress) { bar.at(p.GetPages(), p.GetPagesTotal(), p.GetDamages()) })
	bar.finish()
	if err != nil {
		return err
	}
	out := verifyResult{
		Epoch: r.GetEpoch(), Checkpoint: r.GetCheckpoint(), Pages: r.GetPages(), LeafPages: r.GetLeafPages(), InnerPages: r.GetInnerPages(),
		TreeHeight: int(r.GetTreeHeight()), Keys: r.GetKeys(), Versions: r.GetVersions(), Values: r.GetValues(), ValueBytes: r.GetValueBytes(),
		LogRecords: r.GetLogRecords(), LogBytes: r.GetLogBytes(), Accounted: r.GetAccounted(), DamageTotal: r.GetDamageTotal(),
		Notes: r.GetNotes(), Seconds: r.GetDuration().AsDuration().Seconds(),
	}
	for _, d := range r.GetDamages() {
		out.Damages = append(out.Damages, damageLineOf(d))
	}
	return a.printVerify(&out)
}

func (a *app) verifyFiles(ctx context.Context, dir string, rate uint32) error {
	bar := &pageBar{app: a, what: "verifying"}
	r, err := inspect.VerifyDir(ctx, nil, dir, inspect.VerifyOptions{
		PagesPerSecond: int(rate), Progress: func(p inspect.VerifyProgress) { bar.at(p.Pages, p.PagesTotal, p.Damages) },
	})
	bar.finish()
	if err != nil {
		return err
	}
	return a.printVerify(&verifyResult{
		Epoch: uint64(r.Epoch), Checkpoint: r.Checkpoint, Pages: r.Pages, LeafPages: r.LeafPages, InnerPages: r.InnerPages,
		TreeHeight: r.Height, Keys: r.Keys, Versions: r.Versions, Values: r.Values, ValueBytes: r.ValueBytes,
		LogRecords: r.LogRecords, LogBytes: r.LogBytes, Accounted: r.Accounted, DamageTotal: r.DamageTotal,
		Notes: r.Notes, Seconds: r.Duration.Seconds(), Damages: damageLines(r.Damages),
	})
}

// verifyResult is what verify prints as JSON. The names are part of the interface.
type verifyResult struct {
	Epoch       uint64       `json:"epoch"`
	Checkpoint  uint64       `json:"checkpoint"`
	Pages       uint64       `json:"pages"`
	LeafPages   uint64       `json:"leaf_pages"`
	InnerPages  uint64       `json:"inner_pages"`
	TreeHeight  int          `json:"tree_height"`
	Keys        uint64       `json:"keys"`
	Versions    uint64       `json:"versions"`
	Values      uint64       `json:"values"`
	ValueBytes  uint64       `json:"value_bytes"`
	LogRecords  uint64       `json:"log_records"`
	LogBytes    uint64       `json:"log_bytes"`
	Accounted   bool         `json:"accounted"`
	DamageTotal uint64       `json:"damage_total"`
	Damages     []damageLine `json:"damages,omitempty"`
	Notes       []string     `json:"notes,omitempty"`
	Seconds     float64      `json:"seconds"`
}

// damageLine is one damage as JSON.
type damageLine struct {
	Kind     string `json:"kind"`
	File     string `json:"file,omitempty"`
	Offset   uint64 `json:"offset"`
	Page     uint64 `json:"page,omitempty"`
	KeyLower string `json:"key_lower,omitempty"`
	KeyUpper string `json:"key_upper,omitempty"`
	Reason   string `json:"reason"`
}

func damageLineOf(d *kvpb.Damage) damageLine {
	return damageLine{
		Kind: d.GetKind(), File: d.GetFile(), Offset: d.GetOffset(), Page: d.GetPage(),
		KeyLower: keyText(d.GetKeyLower()), KeyUpper: keyText(d.GetKeyUpper()), Reason: d.GetReason(),
	}
}

func damageLines(damages []inspect.Damage) []damageLine {
	lines := make([]damageLine, 0, len(damages))
	for i := range damages {
		d := &damages[i]
		lines = append(lines, damageLine{
			Kind: string(d.Kind), File: d.File, Offset: uint64(d.Offset), Page: uint64(d.Page),
			KeyLower: keyText(d.KeyLower), KeyUpper: keyText(d.KeyUpper), Reason: d.Reason,
		})
	}
	return lines
}

// keyText is a bound of a range for people and JSON: base64 if it is no text.
func keyText(key []byte) string {
	if utf8.Valid(key) {
		return string(key)
	}
	return "base64:" + base64.StdEncoding.EncodeToString(key)
}

func (a *app) printVerify(r *verifyResult) error {
	format := a.formatOr(formatTable)
	if format != formatTable {
		if err := a.printJSON(format, r); err != nil {
			return err
		}
	} else if err := writeRows(a.out, r.rows(), make([]int, 2)); err != nil {
		return err
	}
	if r.DamageTotal > 0 {
		return fmt.Errorf("%w in %d places", errDamaged, r.DamageTotal)
	}
	return nil
}

func (r *verifyResult) rows() [][]string {
	took := time.Duration(r.Seconds * float64(time.Second)).Round(time.Millisecond)
	rows := [][]string{
		{"state", fmt.Sprintf("epoch %d, checkpoint %d, looked at for %s", r.Epoch, r.Checkpoint, took)},
		{"pages", fmt.Sprintf("%d: %d leaves and %d inner nodes in %d levels, and values", r.Pages, r.LeafPages, r.InnerPages, r.TreeHeight)},
		{"keys", fmt.Sprintf("%d in %d versions, %d values of %s outside the leaves", r.Keys, r.Versions, r.Values, size(r.ValueBytes))},
		{"log", fmt.Sprintf("%d records, %s", r.LogRecords, size(r.LogBytes))},
	}
	for _, note := range r.Notes {
		rows = append(rows, []string{"note", note})
	}
	for i := range r.Damages {
		rows = append(rows, []string{"DAMAGE", r.Damages[i].text()})
	}
	if r.DamageTotal == 0 {
		return append(rows, []string{"result", "sound"})
	}
	return append(rows, []string{"result", fmt.Sprintf("%d damages", r.DamageTotal)})
}

func (d *damageLine) text() string {
	text := d.Kind
	if d.File != "" {
		text += fmt.Sprintf(" in %s at %d", d.File, d.Offset)
	}
	if d.KeyLower != "" || d.KeyUpper != "" || d.Kind == string(inspect.DamagePage) {
		text += fmt.Sprintf(", keys from %s up to %s", boundText(d.KeyLower, "the beginning"), boundText(d.KeyUpper, "the end"))
	}
	return text + ": " + d.Reason
}

func boundText(key, none string) string {
	if key == "" {
		return none
	}
	return fmt.Sprintf("%q", key)
}
