"""The scripts that `snapcore completion` prints."""

from typing import Final

__all__ = ["SCRIPTS"]

# bash takes words apart at : and =, so it hands over the line.
BASH: Final = r"""# bash completion for snapcore
_snapcore() {
    local line=${COMP_LINE:0:COMP_POINT} kind= word= rest=
    COMPREPLY=()
    while IFS=$'\t' read -r word rest; do
        if [[ -z $kind ]]; then
            kind=$word
        else
            COMPREPLY+=("$(printf '%q' "$word")")
        fi
    done < <("$1" completion bash -- "$line" 2>/dev/null)
    case $kind in
        files) compopt -o default 2>/dev/null ;;
        folders) compopt -o default -o plusdirs 2>/dev/null ;;
        *) compopt +o default 2>/dev/null ;;
    esac
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == */ ]]; then
        compopt -o nospace 2>/dev/null
    fi
}
complete -o default -F _snapcore snapcore
"""

ZSH: Final = r"""#compdef snapcore
_snapcore() {
    local -a lines values shown
    local kind line
    lines=("${(@f)$($words[1] completion zsh -- "${(@Q)words[2,CURRENT]}" 2>/dev/null)}")
    kind=$lines[1]
    case $kind in
        files) compset -P '*='; _files ;;
        folders) compset -P '*='; _files -/ ;;
        *)
            for line in "${(@)lines[2,-1]}"; do
                values+=("${line%%$'\t'*}")
                shown+=("${line%%$'\t'*}  ${line#*$'\t'}")
            done
            if (( ${#values} )); then
                if [[ ${#values} -eq 1 && $values[1] == */ ]]; then
                    compadd -S '' -a values
                else
                    compadd -l -d shown -a values
                fi
            fi
            ;;
    esac
}
if [ "$funcstack[1]" = "_snapcore" ]; then
    _snapcore "$@"
else
    compdef _snapcore snapcore
fi
"""

FISH: Final = r"""# fish completion for snapcore
function __snapcore_complete
    set -l words (commandline -opc)
    set -l typed (commandline -ct)
    set -l lines ($words[1] completion fish -- $words[2..-1] "$typed" 2>/dev/null)
    switch "$lines[1]"
        case files
            __fish_complete_path "$typed"
        case folders
            __fish_complete_directories "$typed"
        case '*'
            test (count $lines) -gt 1; and printf '%s\n' $lines[2..-1]
    end
end
complete -c snapcore -f -a '(__snapcore_complete)'
"""

SCRIPTS: Final = {"bash": BASH, "zsh": ZSH, "fish": FISH}
