package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/epochkv/epochkv/client"
)

const (
	endpointDefault = "127.0.0.1:7400"
	endpointEnv     = "KVCTL_ENDPOINT"
	timeoutDefault  = 10 * time.Second
)

// app is one run of kvctl: where it reads and writes, and the flags that every verb has.
type app struct {
	// Constant after construction.
	in                       io.Reader
	out, err                 io.Writer
	inTerminal               bool                       // whether a person types standard input
	outTerminal, errTerminal bool                       // whether a person is looking
	screen                   func() (columns, rows int) // of the terminal that out is; nil if it is not known
	getenv                   func(string) string
	interrupts               *interrupts // of the process; nil in tests

	// Set by flags.
	endpoint string
	context  string // name of a context
	tls      tlsSettings
	timeout  time.Duration
	format   string
	hex      bool
	verb     *cobra.Command // that was executed

	chosen string        // name of the context whose settings are used; empty if none is
	lines  *bufio.Reader // standard input, once secrets are read from it

	writing  bool // a statement's write was sent, or the commit of its transaction, and has not succeeded
	accepted bool // the command line was understood; errors from here on are not about usage
}

// run executes one command line and returns the exit code.
func (a *app) run(ctx context.Context, args []string) int {
	a.in = &interruptible{ctx: ctx, in: a.in}
	root := a.rootCommand()
	root.SetArgs(args)
	verb, err := root.ExecuteContextC(ctx)
	a.verb = verb
	if err != nil && !a.accepted {
		a.format = formatOf(args, a.format)
		err = usageError{err}
	}
	if ctx.Err() != nil && !saysMore(err) {
		return interruptCode(ctx) // the user knows why
	}
	return a.report(err)
}

// saysMore reports whether an error matters after a signal, too: the exit code of a command that ran, the loss of its lock, and what was left.
func saysMore(err error) bool {
	return errors.As(err, new(commandError)) || errors.As(err, new(leftoverError)) || errors.Is(err, client.ErrLeaseLost)
}

// interruptCode is the exit code after a signal, as that of shells: 128 and its number.
func interruptCode(ctx context.Context) int {
	by, _ := errors.AsType[signalError](context.Cause(ctx))
	switch by.signal {
	case syscall.SIGHUP:
		return exitHangup
	case syscall.SIGTERM:
		return exitTerminated
	}
	return exitInterrupted
}

// formatOf is the output format of a command line that was not understood to its end.
func formatOf(args []string, format string) string {
	for i, arg := range args {
		switch name, value, _ := strings.Cut(arg, "="); {
		case name == "--output" && value != "":
			return value
		case (arg == "-o" || arg == "--output") && i+1 < len(args):
			return args[i+1]
		case strings.HasPrefix(arg, "-o") && len(arg) > 2:
			return strings.TrimPrefix(arg[2:], "=")
		}
	}
	return format
}

func (a *app) rootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   "kvctl",
		Short: "Read, write and inspect an EpochKV server",
		Long: `kvctl reads, writes and inspects an EpochKV server.

On a terminal, lists are tables as wide as the terminal at most, and severities have colours unless $NO_COLOR is set; in a pipe nothing is cut,
reports stay as they are, and lists are JSON lines. -o json makes JSON of everything, errors included.

Exit codes: 0 ok, 1 error, 2 usage, 3 not found, 4 conflict or precondition failed, 6 unavailable or timeout, 7 limit,
8 corruption, 9 not permitted, 10 disk full, 129 hung up, 130 interrupted, 143 terminated. A write whose outcome is unknown says so, with -o json as
outcome_unknown; an interrupted one may have happened.`,
		Example: `  kvctl put greeting hello
  kvctl get greeting
  kvctl scan user/ --limit 10
  KVCTL_ENDPOINT=db1:7400 kvctl status`,
		SilenceErrors:     true,
		SilenceUsage:      true,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error { return a.accept(cmd) },
	}
	root.SetIn(a.in)
	root.SetOut(a.out)
	root.SetErr(a.err)
	flags := root.PersistentFlags()
	flags.StringVar(&a.endpoint, "endpoint", "", "server `HOST[:PORT]` (default: port "+portDefault+"; $"+endpointEnv+", or "+endpointDefault+")")
	flags.StringVar(&a.context, "context", "", "use the settings of the context `NAME` (default: $"+contextEnv+", or the one that \"kvctl context use\" chose)")
	a.tls.addFlags(flags)
	flags.DurationVar(&a.timeout, "timeout", timeoutDefault, "bound `DURATION` of one request; scan, import and export take as long as they need unless it is given")
	flags.StringVarP(&a.format, "output", "o", "", "output `FORMAT`: table, json, jsonl or raw (default: table on a terminal and for reports, such as status, slow and config get; else raw for get, jsonl for lists and writes)")
	flags.BoolVar(&a.hex, "hex", false, "keys and values are hexadecimal, on the command line and in the output")
	root.AddCommand(
		a.putCommand(), a.getCommand(), a.delCommand(), a.scanCommand(), a.importCommand(), a.exportCommand(),
		a.watchCommand(), a.feedCommand(), a.incrCommand(), a.casCommand(), a.touchCommand(), a.persistCommand(), a.txnCommand(), a.shellCommand(),
		a.leaseCommand(), a.lockCommand(), a.locksCommand(), a.electCommand(), a.snapshotsCommand(), a.outcomeCommand(), a.verifyCommand(), a.backupCommand(), a.salvageCommand(), a.repairLogCommand(), a.checkpointCommand(), a.spaceCommand(), a.resizeCacheCommand(), a.upgradeCommand(), a.clockCommand(), a.restoreKeyCommand(), a.restoreCommand(), a.archiveCommand(), a.historyCommand(), a.diffCommand(), a.holdsCommand(), a.slowCommand(), a.auditCommand(), a.logCommand(), a.tlsCommand(), a.contextCommand(),
		a.loginCommand(), a.logoutCommand(), a.authCommand(), a.userCommand(), a.roleCommand(), a.tokenCommand(), a.offlineCommand(),
		a.configCommand(), a.benchCommand(), a.checkCommand(), a.statusCommand(), a.topCommand(), a.debugCommand(), a.healthCommand(), a.doctorCommand(), a.versionCommand(), a.completionCommand(),
	)
	root.SetHelpCommand(helpCommand())
	a.addCompletions(root)
	for _, group := range root.Commands() {
		if group.HasSubCommands() && !group.Runnable() { // cobra prints help for a misspelled subcommand, with exit code 0
			group.Args = cobra.NoArgs
			group.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
		}
	}
	return root
}

// helpCommand is cobra's, but for a name that it does not know: cobra prints the usage then, with exit code 0.
func helpCommand() *cobra.Command {
	return &cobra.Command{
		Use:              "help [COMMAND]",
		Short:            "Show the help of a command",
		PersistentPreRun: func(*cobra.Command, []string) {}, // no flag matters
		RunE: func(cmd *cobra.Command, args []string) error {
			about, rest, err := cmd.Root().Find(args)
			if err != nil || len(rest) > 0 {
				return fmt.Errorf("no help about %q; \"kvctl help\" lists the commands", strings.Join(args, " "))
			}
			about.InitDefaultHelpFlag() // so that it is listed
			return about.Help()
		},
	}
}

// accept checks the global flags. It runs once arguments and flags have been parsed.
func (a *app) accept(cmd *cobra.Command) error {
	if cmd.Name() == cobra.ShellCompRequestCmd { // the flags of the command line that is completed are parsed later
		a.accepted = true
		return nil
	}
	if err := cmd.ValidateFlagGroups(); err != nil { // cobra does it too, but later, when it would not count as usage
		return err
	}
	if err := rejectEmptyWords(cmd); err != nil {
		return err
	}
	switch a.format {
	case "", formatTable, formatJSON, formatJSONL, formatRaw:
	default:
		return fmt.Errorf("output format %q: must be table, json, jsonl or raw", a.format)
	}
	if a.timeout <= 0 {
		return fmt.Errorf("--timeout %v: must be positive", a.timeout)
	}
	if err := a.chooseServer(cmd); err != nil {
		return err
	}
	var err error
	if a.endpoint, err = withPort(a.endpoint); err != nil {
		return err
	}
	a.accepted = true
	return nil
}

// idArg reads the id of a transaction or a snapshot.
func idArg(arg, kind string) (uint64, error) {
	id, err := strconv.ParseUint(arg, 10, 64)
	if err != nil {
		return 0, usageError{fmt.Errorf("%q is not the id of a %s; kvctl %s list shows them", arg, kind, idVerbs[kind])}
	}
	return id, nil
}

var idVerbs = map[string]string{"transaction": "txn", "snapshot": "snapshots", "watch": "feed", "hold": "holds"}

// connect makes a client. Retries stay within the timeout, so a person waits no longer than asked for.
func (a *app) connect() (*client.Client, error) {
	return client.Dial(a.endpoint, append(a.tls.options(), client.WithTimeout(a.timeout))...)
}

// withClient runs do with a client and closes it.
func (a *app) withClient(do func(c *client.Client) error) error {
	c, err := a.connect()
	if err != nil {
		return err
	}
	if err := do(c); err != nil {
		_ = c.Close() // do's error says more
		return err
	}
	return c.Close()
}

// longRunning bounds a command that takes as long as its data only if the user gave a timeout.
func (a *app) longRunning(cmd *cobra.Command) (context.Context, context.CancelFunc) {
	if cmd.Flags().Changed("timeout") {
		return context.WithTimeout(cmd.Context(), a.timeout)
	}
	return context.WithCancel(cmd.Context())
}
