/*
 * The option --pollux of sbatch: directives without a #POLLUX line in the script.
 *
 *     sbatch --pollux="min-gpus=2 max-gpus=16" train.sh
 *     #SBATCH --pollux=min-gpus=2
 *
 * The plugin only carries the text. Slurm stores the option in the job's spank_job_env, where job_submit.lua reads and
 * checks it with the grammar of the #POLLUX lines. Slurm loads the plugin in slurmstepd too, which must know the option.
 *
 * Build it against the site's Slurm (see the Makefile) and name it in plugstack.conf:
 *
 *     optional /usr/lib/slurm/spank_pollux.so
 *
 * Source: spank(7).
 */
#include <ctype.h>
#include <string.h>

#include <slurm/spank.h>

SPANK_PLUGIN(pollux, 1);

/* As long as the longest AdminComment that the directives can make; slurmctld never sees more than this of a user. */
#define LONGEST_TEXT 1024

static int take_directives(int val, const char *text, int remote)
{
	(void)val;
	if (remote || text == NULL) /* slurmctld has checked the text before slurmstepd sees it */
		return ESPANK_SUCCESS;
	if (strlen(text) > LONGEST_TEXT) {
		slurm_error("--pollux: expected at most %d characters, got %zu: shorten the text", LONGEST_TEXT, strlen(text));
		return ESPANK_BAD_ARG;
	}
	for (const char *c = text; *c != '\0'; c++) {
		if (!isascii((unsigned char)*c) || !isprint((unsigned char)*c)) {
			slurm_error("--pollux: expected printable ASCII characters, got byte 0x%02x at position %zu: remove it",
				    (unsigned char)*c, (size_t)(c - text) + 1);
			return ESPANK_BAD_ARG;
		}
	}
	return ESPANK_SUCCESS;
}

static struct spank_option option = {
	"pollux",
	"\"KEY=VALUE ...\"",
	"let polluxd choose the GPUs, as #POLLUX lines do (keys: min-gpus, max-gpus, gpu-counts, ...; yes: defaults)",
	1,
	0,
	take_directives,
};

/* Not the table `spank_options`: Slurm ignores a plugin that defines no function of spank(7). */
int slurm_spank_init(spank_t spank, int argc, char **argv)
{
	(void)argc;
	(void)argv;
	return spank_option_register(spank, &option);
}
